// Tiles of few rows with swapped operands against the same tiles in place, and tall tiles against their rows cut into two
// short ones: both are to leave the same in every rank's memory.
#include "emulation.hpp"
// Nothing of the SM90 target comes before that one.
#include "context.hpp"
#include "roles/math.hpp"

#include <memory>
#include <random>
#include <set>
#include <string>

using namespace megamoe;
using namespace megamoe::sm90;

namespace {

static_assert(kFirstMathThread == emulation::kFirstThread && kMathWarps == emulation::kWarps);

constexpr uint32_t kRanks = 2, kOwnRank = 1, kBlocks = 10, kTokens = kBlockM / kRanks;
constexpr uint32_t kIntermediate = 384, kL1Columns = 3;
constexpr uint32_t kHidden = 640, kL2Columns = 3;  // the last L2 tile has one piece
constexpr uint32_t kRowStride = kIntermediate + 16, kTokenStride = kHidden + 8;
constexpr uint32_t kMostStages = 5;  // of a tile: the ring comes round
constexpr uint32_t kFirstTurn = kMaxDepth - 8;  // so do the places of scales
constexpr uint32_t kToPartner = 1u << 24;  // from an address here to the same in the partner's shared memory

struct Height {
  uint32_t rows;
  bool failed = false;
  uint32_t height = rows;  // greater: a rehearsed tile
};

struct Case {
  std::string name;
  std::vector<Height> heights;  // of pool blocks, of which each has one L1 tile and two L2 tiles
  bool clamp = false, fast_math = false;
  bool nan_weight = false, zero_scale = false, zero_operands = false;  // of the last row
  bool partner = false;  // which is told of every stage too
  Stage stage = Stage::combine;
  bool cut = false;  // tall tiles, compared with short ones of the same rows

  const char* other() const { return cut ? "cut in two" : "in place"; }
};

std::mt19937 bits;
float uniform() { return std::ldexp(float(bits() >> 8), -24); }
uint8_t code(bool or_nan) {
  for (;;) {
    const auto result = uint8_t(bits());
    if (or_nan || (result & 127) != 127) return result;
  }
}

Problem problem;
BufferLayout layout;
Context context;
uint8_t* bases[kRanks];
std::vector<uint8_t> memory[kRanks];
std::vector<TileSlot> tiles;
bool in_place;
uint32_t pushed, reloads[kStages];
uint64_t tiles_compared;

template <uint32_t kScaleGroups>
SharedStorage<kScaleGroups>& shared_storage() {
  static SharedStorage<kScaleGroups> storage;
  return storage;
}

// --- memory ---

void lay_out() {
  uint64_t end = 4096;
  const auto region = [&](Region& region, uint64_t num_bytes, uint64_t outer, uint64_t inner = 1) {
    region = {end, {outer, inner, 1}};
    end += num_bytes + 1024 - num_bytes % 1024;
  };
  constexpr uint64_t rows = kBlocks * kBlockM;
  region(layout.token_src_metadata, rows * 3 * 4, 3);
  region(layout.l1_topk_weights, rows * 4, 1);
  region(layout.l2_acts, rows * kRowStride, kRowStride);
  region(layout.l2_acts_sf, rows * 4 * kIntermediate / 64, 1, rows);
  region(layout.combine, uint64_t(kBlocks) * kTokens * kTokenStride * 2, kTokens * kTokenStride, kTokenStride);
  region(layout.l1_accum_debug, kAccumDebugEdge * kAccumDebugEdge * 4, kAccumDebugEdge);
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    memory[rank].resize(end);
    bases[rank] = memory[rank].data();
  }
  problem.num_ranks = kRanks;
  problem.hidden = kHidden;
  problem.intermediate = kIntermediate;
  context.problem = &problem;
  context.layout = &layout;
  context.bases = bases;
  context.own_base = bases[kOwnRank];
  context.rank = kOwnRank;
}

// Of rows that no tile has: NaN, and addresses that lead nowhere.
void fill_memory(const Case& what, uint32_t most_rows) {
  for (auto& bytes : memory) std::fill(bytes.begin(), bytes.end(), 0xab);
  auto* metadata = context.own<uint32_t>(layout.token_src_metadata);
  auto* weight = context.own<float>(layout.l1_topk_weights);
  for (uint32_t pool_row = 0; pool_row < kBlocks * kBlockM; ++pool_row, metadata += 3, ++weight) {
    const uint32_t block = pool_row / kBlockM, row = pool_row % kBlockM;
    const bool valid = row < most_rows;
    metadata[0] = valid ? row % kRanks : 0xdead0000;
    metadata[1] = valid ? (row / kRanks * 7 + 3) % kTokens : bits();
    metadata[2] = valid ? block : bits();
    *weight = valid && !(what.nan_weight && row + 1 == most_rows) ? uniform() - 0.2f : NAN;
  }
}

template <uint32_t kScaleGroups>
void fill_stages(const Case& what, SharedStorage<kScaleGroups>& shared, uint32_t most_rows) {
  for (uint32_t stage = 0; stage < kStages; ++stage) {
    for (uint32_t i = 0; i < sizeof shared.columns[stage]; ++i) shared.columns[stage][i] = code(false);
    for (uint32_t i = 0; i < sizeof shared.rows[stage]; ++i) {
      const uint32_t row = i / kBlockK;
      shared.rows[stage][i] = what.zero_operands && row + 1 == most_rows ? 0 : code(row >= most_rows);
    }
    for (auto& group : shared.row_scales[stage])
      for (uint32_t row = 0; row < kBlockM; ++row)
        if (row >= most_rows) {
          group[row] = NAN;
        } else {
          group[row] = what.zero_scale && row + 1 == most_rows ? 0.0f : std::ldexp(uniform(), int(bits() % 14) - 10);
        }
  }
}

// What loads change.
template <uint32_t kScaleGroups>
struct Stages {
  using Shared = SharedStorage<kScaleGroups>;
  decltype(Shared::rows) rows;
  decltype(Shared::row_scales) row_scales;

  explicit Stages(const Shared& shared) {
    std::memcpy(rows, shared.rows, sizeof rows);
    std::memcpy(row_scales, shared.row_scales, sizeof row_scales);
  }
  void put_back(Shared& shared) const {
    std::memcpy(shared.rows, rows, sizeof rows);
    std::memcpy(shared.row_scales, row_scales, sizeof row_scales);
  }
};

// In any order: none of them reads what another one writes.
void make_tiles(const Case& what) {
  tiles.clear();
  const auto add = [&](TileWork work, uint32_t block, uint32_t column, const Height& height) {
    TileSlot tile{};
    tile.work = work;
    tile.block = block;
    tile.column = column;
    tile.rows = height.rows;
    tile.height = height.height;
    tile.failed = height.failed;
    tile.depth = 1 + bits() % kMostStages;
    tile.pieces = work == TileWork::l2 && column + 1 == kL2Columns ? 1 : 2;
    for (auto& scales : tile.scales)
      for (float& scale : scales) scale = std::ldexp(uniform() + 0.1f, int(bits() % 6) - 21);  // sums of about 1
    tiles.push_back(tile);
  };
  for (uint32_t block = 0; block < what.heights.size(); ++block) {
    add(TileWork::l1, block, block % kL1Columns, what.heights[block]);
    add(TileWork::l2, block, block % (kL2Columns - 1), what.heights[block]);
    add(TileWork::l2, block, kL2Columns - 1, what.heights[block]);
  }
  std::shuffle(tiles.begin(), tiles.end(), bits);
  uint32_t end = kFirstTurn;
  for (uint32_t turn = 0; turn < tiles.size(); ++turn) {
    tiles[turn].turn = turn;
    tiles[turn].end = end += tiles[turn].depth;
  }
}

// --- runs ---

// The load and schedule roles, as far as the math warps let them: a stage is loaded when all have released it, a slot filled
// when its last tile was taken out and the one kUntoldTiles before the new one is stored.
template <uint32_t kScaleGroups>
void load_and_push() {
  auto& shared = shared_storage<kScaleGroups>();
  const auto arrived = [](const uint64_t* barrier, uint32_t times) {
    return times == 0 || emulation::arrivals[shared_address(barrier)] >= kMathWarps * times;
  };
  for (uint32_t stage = 0; stage < kStages; ++stage) {
    emulation::phases[shared_address(&shared.full[stage])] = kFirstTurn / kStages + 1 + reloads[stage];
    if (!arrived(&shared.empty[stage], reloads[stage] + 1)) continue;
    ++reloads[stage];
    ++emulation::phases[shared_address(&shared.full[stage])];
    for (uint8_t& code : shared.rows[stage]) code ^= 0x80;
    emulation::take_operands(shared_address(shared.rows[stage]), sizeof shared.rows[stage]);
    for (auto& group : shared.row_scales[stage])
      for (float& scale : group) scale *= reloads[stage] % 2 ? 3.0f : 0.5f;
  }
  while (pushed < tiles.size() && arrived(&shared.tile_empty[pushed % kTileSlots], pushed / kTileSlots) &&
         arrived(&shared.stored[pushed % kUntoldTiles], pushed / kUntoldTiles)) {
    shared.tiles[pushed % kTileSlots] = tiles[pushed];
    ++pushed;
  }
}

template <uint32_t kScaleGroups, bool kFast>
void run_math() {
  auto& shared = shared_storage<kScaleGroups>();
  MathRole<kScaleGroups, kFast, true> role(context, shared);
  role.stage_.turn = kFirstTurn;
  for (uint32_t turn = 0; turn < tiles.size(); ++turn) {
    while (turn >= pushed) emulation::yield();
    const TileSlot& tile = shared.tiles[turn % kTileSlots];
    const auto run = [&] {
      if (!in_place) return role.run_tile(tile);
      return tile.height > kShortM ? role.template run_in_place<2>(tile) : role.template run_in_place<1>(tile);
    };
    if (run() != turn) emulation::fail("a tile that returns another turn than its own");
  }
}

// Columns of the products that a tile takes.
uint32_t product_columns(uint32_t height, bool fast) {
  if (height > kMostSwapped) return height > kShortM && fast ? 256 : 128;
  return height > 16 ? 32 : height > 8 ? 16 : 8;
}

// Where in memory, and in what region.
std::string place_of(uint64_t byte) {
  const std::pair<const char*, Region> regions[] = {{"l2_acts", layout.l2_acts},
                                                    {"l2_acts_sf", layout.l2_acts_sf},
                                                    {"combine", layout.combine},
                                                    {"l1_accum_debug", layout.l1_accum_debug}};
  std::string place = "what no tile writes";
  for (const auto& [name, region] : regions)
    if (byte >= region.offset) place = std::string(name) + " + " + std::to_string(byte - region.offset);
  return place;
}

template <uint32_t kScaleGroups>
void set_up(const Case& what) {
  auto& shared = shared_storage<kScaleGroups>();
  emulation::shared_memory = reinterpret_cast<uint8_t*>(&shared);
  problem.l2_sf_granularity = kBlockK / kScaleGroups;
  context.stage = what.stage;
  const auto last = uint32_t(what.heights.size() - 1);
  uint32_t most_rows = 0;
  for (const Height& height : what.heights) most_rows = std::max(most_rows, height.rows);
  shared.launch.has_clamp = what.clamp;
  shared.launch.activation_clamp = 7.0f;
  shared.launch.fast_math = what.fast_math;
  shared.partner_empty = what.partner ? shared_address(shared.empty) + kToPartner : 0;
  shared.launch.debug = 1;
  shared.launch.debug_row_block = last;
  shared.launch.debug_column_block = 2 * (last % kL1Columns) + most_rows % 2;
  fill_memory(what, most_rows);
  fill_stages(what, shared, most_rows);
  make_tiles(what);
}

struct Outcome {
  std::vector<uint8_t> memory[kRanks];
  std::map<uint32_t, uint64_t> arrivals, multiplied;
};

// Leaves memory and stages as they were.
template <uint32_t kScaleGroups, bool kFast>
Outcome outcome_of(bool run_in_place) {
  auto& shared = shared_storage<kScaleGroups>();
  Outcome result;
  for (uint32_t rank = 0; rank < kRanks; ++rank) result.memory[rank] = memory[rank];
  const auto stages = std::make_unique<Stages<kScaleGroups>>(shared);
  std::memset(static_cast<void*>(&shared.targets), 0xee, sizeof shared.targets);
  std::memset(shared.row_amax, 0xee, sizeof shared.row_amax);
  emulation::take_operands(0, sizeof shared.rows + sizeof shared.columns);
  in_place = run_in_place;
  pushed = 0;
  std::fill_n(reloads, kStages, 0);
  emulation::run(run_math<kScaleGroups, kFast>, load_and_push<kScaleGroups>, bits());
  stages->put_back(shared);
  for (uint32_t rank = 0; rank < kRanks; ++rank)
    std::swap_ranges(memory[rank].begin(), memory[rank].end(), result.memory[rank].begin());
  result.arrivals = emulation::arrivals;
  result.multiplied = emulation::multiplied;
  return result;
}

// Of the same rows in short tiles: those below kShortM, then the others, which lie in their place in the stages, while every
// region begins kShortM rows later.
template <uint32_t kScaleGroups, bool kFast>
Outcome outcome_cut_in_two() {
  auto& shared = shared_storage<kScaleGroups>();
  const std::vector<TileSlot> tall = tiles;
  const BufferLayout whole = layout;
  const auto stages = std::make_unique<Stages<kScaleGroups>>(shared);
  for (TileSlot& tile : tiles) tile.rows = tile.height = kShortM;
  Outcome below = outcome_of<kScaleGroups, kFast>(false);
  for (uint32_t i = 0; i < tiles.size(); ++i) tiles[i].rows = tiles[i].height = tall[i].rows - kShortM;
  for (auto& rows : shared.rows) std::copy_n(rows + kShortM * kBlockK, kShortM * kBlockK, rows);
  for (auto& groups : shared.row_scales)
    for (auto& group : groups) std::copy_n(group + kShortM, kShortM, group);
  layout.token_src_metadata.offset += kShortM * 3 * 4;
  layout.l1_topk_weights.offset += kShortM * 4;
  layout.l2_acts.offset += kShortM * kRowStride;
  layout.l2_acts_sf.offset += kShortM * 4;
  layout.l1_accum_debug.offset += kShortM * kAccumDebugEdge * 4;
  const auto swap_memory = [&] {
    for (uint32_t rank = 0; rank < kRanks; ++rank)
      std::swap_ranges(memory[rank].begin(), memory[rank].end(), below.memory[rank].begin());
  };
  swap_memory();
  Outcome result = outcome_of<kScaleGroups, kFast>(false);
  swap_memory();
  layout = whole;
  stages->put_back(shared);
  tiles = tall;
  return result;
}

// Whether every warp said of every stage, and to the partner where there is one, that it is done with it, and of every tile
// that it took its slot and stored its results; and nothing else.
template <uint32_t kScaleGroups>
bool releases(const Case& what, const std::map<uint32_t, uint64_t>& arrivals) {
  const auto at = [&](uint32_t barrier) { return arrivals.contains(barrier) ? arrivals.at(barrier) : 0; };
  uint64_t all = 0;
  for (const auto& [barrier, times] : arrivals) all += times;
  const uint64_t stages = tiles.back().end - kFirstTurn;
  if (all != kMathWarps * (stages * (what.partner ? 2 : 1) + 2 * tiles.size())) return false;
  uint32_t uses[kStages] = {};
  for (uint32_t turn = kFirstTurn; turn != tiles.back().end; ++turn) ++uses[turn % kStages];
  for (uint32_t stage = 0; stage < kStages; ++stage) {
    const uint32_t barrier = shared_address(&shared_storage<kScaleGroups>().empty[stage]);
    const uint32_t told = kMathWarps * uses[stage];
    if (at(barrier) != told || at(barrier + kToPartner) != (what.partner ? told : 0)) return false;
  }
  return true;
}

// Whether a row of l2_acts that no tile has was written.
bool stores_beyond(const Case& what, const std::vector<uint8_t>& own) {
  const auto changed = [&](uint64_t byte, uint64_t num_bytes) {
    return std::memcmp(&own[byte], &memory[kOwnRank][byte], num_bytes) != 0;
  };
  for (uint32_t pool_row = 0; pool_row < kBlocks * kBlockM; ++pool_row) {
    const uint32_t block = pool_row / kBlockM;
    if (block < what.heights.size() && pool_row % kBlockM < what.heights[block].rows) continue;
    if (changed(layout.l2_acts.offset + pool_row * kRowStride, kRowStride)) return true;
    for (uint32_t group = 0; group < kIntermediate / 64; ++group)
      if (changed(layout.l2_acts_sf.offset + 4 * (group * layout.l2_acts_sf.stride[1] + pool_row), 4)) return true;
  }
  return false;
}

// What is wrong with the outcome of tiles as they are run, or nothing.
template <uint32_t kScaleGroups>
std::string fault(const Case& what, bool fast, const Outcome& outcome, const Outcome& expected) {
  std::set<uint32_t> columns, expected_columns;
  for (const auto& products : outcome.multiplied) columns.insert(products.first);
  for (const Height& height : what.heights) expected_columns.insert(product_columns(height.height, fast));
  if (columns != expected_columns) return "products of other heights than the tiles'";
  const std::string others = std::string("tiles ") + what.other();
  if (!releases<kScaleGroups>(what, expected.arrivals)) return others + " arrive where they should not";
  if (stores_beyond(what, expected.memory[kOwnRank])) return others + " store rows that are none";
  if (outcome.arrivals != expected.arrivals) return "other arrivals at stages, slots or results";
  const bool stores = what.heights[0].rows > 0 && !what.heights[0].failed;
  if (stores != (expected.memory[kOwnRank] != memory[kOwnRank])) return others + " do not store what they should";
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    const auto &have = outcome.memory[rank], &want = expected.memory[rank];
    if (have == want) continue;
    const auto byte = uint64_t(std::mismatch(have.begin(), have.end(), want.begin()).first - have.begin());
    char values[64];
    std::snprintf(values, sizeof values, ": 0x%02x, %s 0x%02x", have[byte], what.other(), want[byte]);
    return "rank " + std::to_string(rank) + ", " + place_of(byte) + values;
  }
  return "";
}

template <uint32_t kScaleGroups, bool kFast>
bool agree(const Case& what) {
  set_up<kScaleGroups>(what);
  const Outcome expected =
      what.cut ? outcome_cut_in_two<kScaleGroups, kFast>() : outcome_of<kScaleGroups, kFast>(true);
  const std::string found = fault<kScaleGroups>(what, kFast, outcome_of<kScaleGroups, kFast>(false), expected);
  tiles_compared += tiles.size();
  if (found.empty()) return true;
  std::printf("%s, granularity %u, %s sums: %s\n", what.name.c_str(), problem.l2_sf_granularity, kFast ? "fast" : "fp32",
              found.c_str());
  return false;
}

std::vector<Case> make_cases() {
  std::vector<Case> cases;
  for (const uint32_t rows : {101, 128})
    cases.push_back({.name = std::to_string(rows) + " rows", .heights = {{rows}}, .cut = true});
  for (const uint32_t rows : {0, 1, 7, 8, 9, 16, 17, 31, 32, 33}) {
    const std::string name = std::to_string(rows) + " rows";
    cases.push_back({.name = name, .heights = {{rows}}});
    cases.push_back({.name = name + ", clamp, fast_math, partner",
                     .heights = {{rows}},
                     .clamp = true,
                     .fast_math = true,
                     .partner = true});
  }
  for (const uint32_t rows : {6, 13, 27}) {
    const std::string name = std::to_string(rows) + " rows";
    cases.push_back({.name = name + ", clamp, weight NaN", .heights = {{rows}}, .clamp = true, .nan_weight = true});
    cases.push_back({.name = name + ", fast_math, scale 0", .heights = {{rows}}, .fast_math = true, .zero_scale = true});
    cases.push_back({.name = name + ", operands 0", .heights = {{rows}}, .zero_operands = true});
    cases.push_back({.name = name + ", sums only", .heights = {{rows}}, .stage = Stage::l1_gemm});
  }
  for (const uint32_t height : {8, 9, 32, 33, 65})
    cases.push_back({.name = "rehearsed, " + std::to_string(height) + " rows", .heights = {{0, false, height}}});
  for (const bool clamp : {false, true})
    cases.push_back({.name = "sequence",
                     .heights = {{8}, {0, false, 20}, {0, false, 40}, {16, true}, {70}, {5}, {33, true}, {17}, {40}, {32}},
                     .clamp = clamp,
                     .partner = clamp});
  cases.push_back({.name = "tall sequence",
                   .heights = {{70}, {128}, {100}, {65}},
                   .clamp = true,
                   .fast_math = true,
                   .partner = true,
                   .cut = true});
  return cases;
}

}  // namespace

int main() {
  emulation::fail_at_addresses_that_lead_nowhere();
  lay_out();
  for (const Case& what : make_cases())
    if (!agree<1, false>(what) || !agree<1, true>(what) || !agree<2, false>(what) || !agree<2, true>(what)) return 1;
  std::printf("%llu tiles leave the same\n", static_cast<unsigned long long>(tiles_compared));
}

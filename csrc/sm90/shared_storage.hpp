// The shared memory of a CTA of the fused kernel.
#pragma once
#include "ptx/pipeline.hpp"
#include "roles/row_puller.hpp"
#include "tiles.hpp"
#include "warp_team.hpp"
#include "worker.hpp"

namespace megamoe::sm90 {

constexpr uint32_t kBlockM = 128;  // rows of a tall tile and of a pool block
constexpr uint32_t kShortM = 64;   // rows of a short tile: both math warpgroups take the same rows, half the columns
constexpr uint32_t kMostSwapped = 32;  // rows of a tile whose operands are swapped, at most
constexpr uint32_t kBlockN = 256;
constexpr uint32_t kBlockK = 128;
constexpr uint32_t kPieceN = 128;  // columns of one product; two make a tall tile
constexpr uint32_t kStages = 4;
constexpr uint32_t kLeanStages = 2;  // under way for a tile that others should overtake
constexpr uint32_t kTileSlots = 2;
constexpr uint32_t kUntoldTiles = 4;  // one in each slot, one in its epilogue, one whose results are being told of
constexpr uint32_t kSharedBases = 8;  // ranks whose buffers' addresses are at hand; of more they are read from memory
constexpr uint32_t kMailSlots = 8;  // a leader is at most kStages + 1 tiles ahead of its partner
constexpr uint32_t kClaimLead = 8;  // stages before the end of a tile at which the next one is claimed

constexpr uint32_t kMathWarpgroups = 2;
constexpr uint32_t kMathWarps = 4 * kMathWarpgroups;
constexpr uint32_t kScheduleWarp = 1;
constexpr uint32_t kPullWarps = 2;
constexpr uint32_t kFirstMathThread = 128;
constexpr uint32_t kThreads = kFirstMathThread + 128 * kMathWarpgroups;

// Named barriers; 0 is the whole CTA's.
constexpr uint32_t kDispatchBarrier = 1;   // the first warpgroup
constexpr uint32_t kMathBarrier = 2;       // both math warpgroups
constexpr uint32_t kCtaBarrier = 3;        // every role has ended

using Puller = RowPuller<4, 1792>;  // a row of 7168 bytes in four pieces
using DispatchTeam = WarpTeam<4, RouteScratch>;  // the whole first warpgroup, before its warps part

enum class TileWork : uint32_t { l1, l2, stop };

constexpr uint32_t kMaxDepth = 128;  // stages of a tile: hidden and intermediate up to 16,384

// What the schedule role tells the load and math roles about a tile.
struct TileSlot {
  TileWork work;
  uint32_t block, column, rows, expert;
  uint32_t height;   // rows whose code it runs: `rows`, but for a rehearsed tile
  uint32_t depth;    // stages
  uint32_t end;      // number, among all stages of the CTA, of the first one after this tile's
  uint32_t pieces;   // of 128 columns; the last L2 tile of a row may have only one
  uint32_t turn;     // which tile of this CTA it is
  uint32_t failed;   // the rows never came: compute on, store nothing
  uint32_t stages;   // that may be under way at a time
  uint32_t shared;   // the partner's tile has the same weights: each of the two CTAs loads half of them for both
  // Weight scales along K: gate and up of an L1 tile, whose 8-column groups alternate; the two pieces of an L2 tile. Those of
  // the CTA's stage number n lie at n % kMaxDepth.
  float scales[2][kMaxDepth];
};

// A tile without rows whose code is to be fetched: it has no weights either, and its epilogue runs.
MEGAMOE_FN bool is_rehearsed(const TileSlot& tile) { return tile.rows == 0 && tile.failed == 0; }

// What the schedule role keeps of a tile until its results are stored and it has said so.
struct UntoldTile {
  TileWork work;
  uint32_t block, column, expert, failed;
  uint32_t expert_steps;
};

// A warpgroup's rows of a tile as the epilogue needs them, by ThreadPlace::first_row(false).
struct RowTargets {
  uint32_t metadata[kShortM][3];  // source, token, slot
  float weight[kShortM];
};

template <uint32_t kScaleGroups>  // of K, in a stage
struct SharedStorage {
  alignas(1024) uint8_t rows[kStages][kBlockM * kBlockK];
  alignas(1024) uint8_t columns[kStages][kBlockN * kBlockK];
  alignas(128) float row_scales[kStages][kScaleGroups][kBlockM];
  Puller::Shared pull[kPullWarps];
  RowTargets targets[kMathWarpgroups];
  float row_amax[kUntoldTiles][kMathWarpgroups][kShortM];  // by the tile's turn: a tile is told of after all have read
  alignas(8) uint64_t full[kStages];
  // Each math warp arrives when it is done with a stage, and from the first pair of blocks on at the partner's barrier too.
  uint64_t empty[kStages];
  uint32_t partner_empty;  // cluster address of the partner's `empty`; 0 before the first pair of blocks
  uint64_t tile_full[kTileSlots];
  uint64_t tile_empty[kTileSlots];
  uint64_t rows_ready[kTileSlots];
  uint64_t claim_next;
  Mail state_of_partner;
  Mail claimed[kMailSlots];  // by turn: the number of the tile
  uint64_t stored[kUntoldTiles];  // by the tile's turn: its results are on their way
  TileSlot tiles[kTileSlots];
  UntoldTile untold[kUntoldTiles];
  Patience patience;  // of the schedule role with the inputs of the last tile
  typename DispatchTeam::Shared dispatch_team;
  Entered entered;
  TileOrder order;  // of the schedule role
  uint64_t maps;  // address of this rank's TensorMaps
  uint64_t bases[kSharedBases];  // of the context
  Problem problem;
  BufferLayout layout;
  LaunchArguments launch;
  Context context;
};

}  // namespace megamoe::sm90

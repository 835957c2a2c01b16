// Stress program: R virtual ranks in one process run the sources of the host target, epoch after epoch. Each rank has a
// thread that fills its inputs, launches, waits for its own launch and reads the results; nothing but the protocol
// synchronises the ranks, so they run ahead of each other as far as it lets them.
//
//   stress REQUEST RESULTS
//
// REQUEST and RESULTS are written and read by megamoe/stress_program.py. A line on standard output says how each run went, a
// line that begins with "fault" holds the words of a fault record. Exit status: 0 all runs are right, 1 some are not,
// 2 REQUEST cannot be read, 3 a run did not end in time.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>

#include "stress_check.hpp"
#include "stress_structs.hpp"

namespace megamoe::host {
namespace {

constexpr int kExitWrong = 1, kExitRequest = 2, kExitWatchdog = 3;

#if defined(MEGAMOE_PERTURB)
void seed_perturbation(uint64_t seed) { perturbation::seed = seed; }
uint64_t hits(Point point) { return perturbation::hits[uint32_t(point)]; }
#else
void seed_perturbation(uint64_t) {}
uint64_t hits(Point) { return 0; }
#endif

// A rank's symmetric buffer: zeroed pages.
class Pages {
 public:
  explicit Pages(size_t bytes)
      : bytes_(bytes), start_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (start_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~Pages() { munmap(start_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  uint8_t* data() const { return static_cast<uint8_t*>(start_); }

 private:
  size_t bytes_;
  void* start_;
};

struct Digest {
  uint64_t value = 0;
  template <class T>
  void add(const T* items, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) value = mix(value + uint64_t(items[i]) + 0x9e3779b97f4a7c15ull);
  }
};

// One rank: its buffer, its stream, and the loop of its thread.
class StressRank {
 public:
  StressRank(const Problem& problem, const BufferLayout& layout, const StressOptions& options, uint32_t rank,
             const std::vector<uint8_t*>& bases)
      : options_(options),
        inputs_(problem, options.seed, options.truncate_every),
        weights_(inputs_, rank),
        rank_{problem, layout, rank, bases, &status_},
        y_(uint64_t(problem.max_tokens) * problem.hidden),
        received_(problem.experts_per_rank),
        stream_(options.num_workers) {}

  template <class BeforeEpoch>
  void run(BeforeEpoch before_epoch) {
    if (options_.dump_inputs) write_weights();
    for (uint64_t epoch = 1; epoch <= options_.num_epochs; ++epoch) {
      before_epoch();
      reached_.store(epoch, std::memory_order_relaxed);
      fill(epoch);
      if (!launch(epoch)) return;
      read(epoch);
    }
  }

  const std::vector<uint8_t>& records() const { return records_; }
  const std::string& wrong() const { return wrong_; }
  uint64_t reached() const { return reached_.load(std::memory_order_relaxed); }

  void print_faults() const {
    const auto& layout = rank_.layout;
    const uint32_t faults = *own<uint32_t>(layout.fault_count);
    for (uint32_t i = 0; i < smaller(faults, kMaxFaultRecords); ++i) {
      std::printf("fault");
      for (uint32_t word = 0; word < uint32_t(FaultWord::number_of_words); ++word)
        std::printf(" %u", own<uint32_t>(layout.fault_records)[i * layout.fault_records.stride[0] + word]);
      std::printf("\n");
    }
  }

 private:
  template <class T>
  T* own(const Region& region) const {
    return reinterpret_cast<T*>(rank_.bases[rank_.rank] + region.offset);
  }

  void fill(uint64_t epoch) {
    const auto& layout = rank_.layout;
    const auto& problem = rank_.problem;
    num_tokens_ = inputs_.num_tokens(epoch, rank_.rank);
    for (uint32_t token = 0; token < num_tokens_; ++token) {
      inputs_.x_row(epoch, rank_.rank, token, own<uint8_t>(layout.x) + token * layout.x.stride[0]);
      for (uint32_t group = 0; group < problem.hidden / kScaleBlock; ++group)
        own<float>(layout.x_sf)[token * layout.x_sf.stride[0] + group] = inputs_.x_sf(epoch, rank_.rank, token, group);
    }
    for (uint32_t route = 0; route < num_tokens_ * problem.num_topk; ++route) {
      own<int64_t>(layout.topk_idx)[route] = inputs_.expert(epoch, rank_.rank, route);
      own<float>(layout.topk_weights)[route] = inputs_.topk_weight(epoch, rank_.rank, route);
    }
    std::fill(y_.begin(), y_.end(), uint16_t(0x5555));
    std::fill(received_.begin(), received_.end(), 0);
  }

  // False when the group is aborted.
  bool launch(uint64_t epoch) {
    num_tokens_word_ = int32_t(num_tokens_);
    LaunchArguments arguments{};
    arguments.y = reinterpret_cast<uint64_t>(y_.data());
    arguments.l1_weight = reinterpret_cast<uint64_t>(weights_.l1.data());
    arguments.l1_sf = reinterpret_cast<uint64_t>(weights_.l1_sf.data());
    arguments.l2_weight = reinterpret_cast<uint64_t>(weights_.l2.data());
    arguments.l2_sf = reinterpret_cast<uint64_t>(weights_.l2_sf.data());
    arguments.recv_stats = reinterpret_cast<uint64_t>(received_.data());
    // Half of the launches learn their number of tokens from memory, as a replayed graph does.
    arguments.num_tokens_word = epoch % 2 == 0 ? 0 : reinterpret_cast<uint64_t>(&num_tokens_word_);
    arguments.num_tokens = epoch % 2 == 0 ? num_tokens_ : rank_.problem.max_tokens;  // what y has room for
    arguments.timeout_ns = options_.timeout_ns;
    arguments.launch = epoch;
    arguments.stage = uint32_t(inputs_.stage(epoch));
    stream_.wait(stream_.launch(&rank_, arguments), options_.limit_s * 1'000'000'000ull);
    const uint64_t completed = SystemRef<uint64_t>(status_.completed_epoch).load(acquire);
    if (SystemRef<uint64_t>(status_.aborted_epoch).load(acquire) == 0 && completed == epoch &&
        SystemRef<uint64_t>(status_.fault_count).load(acquire) == 0)
      return true;
    note(epoch, completed == epoch ? "the launch was aborted" : "the launch did not complete its epoch");
    return false;
  }

  void read(uint64_t epoch) {
    const std::string wrong = PoolCheck(rank_, inputs_, epoch).run(received_);
    if (!wrong.empty()) note(epoch, wrong);
    const Stage stage = inputs_.stage(epoch);
    const uint32_t y_rows = stage == Stage::combine ? num_tokens_ : 0;
    const uint32_t inputs = options_.dump_inputs ? num_tokens_ : 0;
    append(StressRecord{view_digest(stage), uint32_t(epoch), rank_.rank, uint32_t(stage), y_rows, inputs, 0});
    append(y_.data(), uint64_t(y_rows) * rank_.problem.hidden);
    if (inputs != 0) write_inputs();
  }

  // Over what the launch computed beside y: l2_acts of the rows in use, combine of the valid routes.
  uint64_t view_digest(Stage stage) const {
    const auto& layout = rank_.layout;
    const auto& problem = rank_.problem;
    Digest digest;
    const uint32_t blocks = own<uint32_t>(layout.expert_blocks)[problem.experts_per_rank];
    for (uint32_t block = 0; stage >= Stage::l1_epilogue && block < blocks; ++block) {
      const uint32_t rows = own<PoolBlock>(layout.pool_blocks)[block].rows;
      for (uint64_t row = uint64_t(block) * problem.block_m; row < uint64_t(block) * problem.block_m + rows; ++row) {
        const uint8_t* acts = own<uint8_t>(layout.l2_acts) + row * layout.l2_acts.stride[0];
        digest.add(reinterpret_cast<const uint64_t*>(acts), problem.intermediate / 8);
        for (uint32_t group = 0; group < problem.intermediate / problem.l2_sf_granularity; ++group)
          digest.add(own<uint32_t>(layout.l2_acts_sf) + row + group * layout.l2_acts_sf.stride[1], 1);
      }
    }
    for (uint32_t route = 0; stage >= Stage::l2_gemm && route < num_tokens_ * problem.num_topk; ++route) {
      if (own<int64_t>(layout.topk_idx)[route] < 0) continue;
      const uint64_t row = route % problem.num_topk * layout.combine.stride[0] +
                           route / problem.num_topk * layout.combine.stride[1];
      digest.add(reinterpret_cast<const uint64_t*>(own<uint16_t>(layout.combine) + row), problem.hidden / 4);
    }
    return digest.value;
  }

  void write_inputs() {
    const auto& layout = rank_.layout;
    const auto& problem = rank_.problem;
    append(own<uint8_t>(layout.x), uint64_t(num_tokens_) * problem.hidden);
    for (uint32_t token = 0; token < num_tokens_; ++token)
      append(own<float>(layout.x_sf) + token * layout.x_sf.stride[0], problem.hidden / kScaleBlock);
    append(own<int64_t>(layout.topk_idx), uint64_t(num_tokens_) * problem.num_topk);
    append(own<float>(layout.topk_weights), uint64_t(num_tokens_) * problem.num_topk);
  }

  void write_weights() {
    append(StressRecord{0, 0, rank_.rank, 0, 0, 0, 1});
    append(weights_.l1.data(), weights_.l1.size());
    append(weights_.l1_sf.data(), weights_.l1_sf.size());
    append(weights_.l2.data(), weights_.l2.size());
    append(weights_.l2_sf.data(), weights_.l2_sf.size());
  }

  template <class T>
  void append(const T* items, uint64_t count) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(items);
    records_.insert(records_.end(), bytes, bytes + count * sizeof(T));
  }
  void append(const StressRecord& record) { append(&record, 1); }

  void note(uint64_t epoch, const std::string& what) {
    if (wrong_.empty()) wrong_ = "rank " + std::to_string(rank_.rank) + " epoch " + std::to_string(epoch) + ": " + what;
  }

  const StressOptions& options_;
  StressInputs inputs_;
  StressWeights weights_;
  HostStatus status_{};
  Rank rank_;
  std::vector<uint16_t> y_;
  std::vector<int32_t> received_;
  uint32_t num_tokens_ = 0;
  int32_t num_tokens_word_ = 0;
  std::vector<uint8_t> records_;
  std::string wrong_;
  std::atomic<uint64_t> reached_{0};
  Stream stream_;
};

struct Request {
  Problem problem;
  BufferLayout layout;
  StressOptions options;
};

// All ranks from a fresh buffer through all epochs. True if everything was right.
bool run_once(const Request& request, uint64_t perturb_seed, std::ofstream& results) {
  const auto& [problem, layout, options] = request;
  seed_perturbation(perturb_seed);
  std::vector<std::unique_ptr<Pages>> buffers;
  std::vector<uint8_t*> bases;
  for (uint32_t rank = 0; rank < problem.num_ranks; ++rank) {
    buffers.push_back(std::make_unique<Pages>(options.buffer_bytes));
    bases.push_back(buffers.back()->data());
  }
  std::vector<std::unique_ptr<StressRank>> ranks;
  for (uint32_t rank = 0; rank < problem.num_ranks; ++rank)
    ranks.push_back(std::make_unique<StressRank>(problem, layout, options, rank, bases));

  std::mutex mutex;
  std::condition_variable ended;
  uint32_t running = problem.num_ranks;
  std::barrier<> between_epochs(problem.num_ranks);
  std::vector<std::thread> threads;
  for (auto& rank : ranks)
    threads.emplace_back([&] {
      rank->run([&] {
        if (options.barriers) between_epochs.arrive_and_wait();
      });
      between_epochs.arrive_and_drop();
      const std::lock_guard lock(mutex);
      --running;
      ended.notify_all();
    });
  {
    std::unique_lock lock(mutex);
    if (!ended.wait_for(lock, std::chrono::seconds(options.limit_s), [&] { return running == 0; })) {
      std::printf("seed %lu: not ended after %u s; epochs reached:", perturb_seed, options.limit_s);
      for (auto& rank : ranks) std::printf(" %lu", rank->reached());
      std::printf("\n");
      std::fflush(stdout);
      _exit(kExitWatchdog);  // threads that never return cannot be joined
    }
  }
  for (std::thread& thread : threads) thread.join();

  std::string wrong;
  uint64_t bytes = 0;
  for (auto& rank : ranks) {
    bytes += rank->records().size();
    if (wrong.empty()) wrong = rank->wrong();
    rank->print_faults();
  }
  const StressRun header{perturb_seed, bytes};
  results.write(reinterpret_cast<const char*>(&header), sizeof header);
  for (auto& rank : ranks)
    results.write(reinterpret_cast<const char*>(rank->records().data()), std::streamsize(rank->records().size()));
  results.flush();
  std::printf("seed %lu: %s\n", perturb_seed, wrong.empty() ? "right" : wrong.c_str());
  std::fflush(stdout);
  return wrong.empty();
}

void print_hits() {
  constexpr const char* kNames[] = {"claim", "publish", "wait",  "arrive", "mark_tile",
                                    "tile_done", "store",   "enter", "leave"};
  static_assert(std::size(kNames) == uint32_t(Point::number_of_points));
  for (uint32_t point = 0; point < std::size(kNames); ++point)
    std::printf("hits %s %lu\n", kNames[point], hits(Point(point)));
}

std::optional<Request> read_request(const char* path) {
  Request request{};
  std::ifstream file(path, std::ios::binary);
  const auto read = [&](auto& value) { file.read(reinterpret_cast<char*>(&value), sizeof value); };
  read(request.problem);
  read(request.layout);
  read(request.options);
  if (!file || file.peek() != std::ifstream::traits_type::eof()) return std::nullopt;
  return request;
}

}  // namespace
}  // namespace megamoe::host

int main(int count, char** arguments) {
  using namespace megamoe::host;
  const auto request = count == 3 ? read_request(arguments[1]) : std::nullopt;
  if (!request) {
    std::fprintf(stderr, "usage: %s REQUEST RESULTS; REQUEST must hold exactly the structs of megamoe/stress_program.py\n",
                 arguments[0]);
    return kExitRequest;
  }
  std::ofstream results(arguments[2], std::ios::binary);
  bool right = true;
  for (uint32_t run = 0; run < request->options.num_perturb_seeds; ++run) {
    right = run_once(*request, request->options.first_perturb_seed + run, results) && right;
    if (!right && request->options.stop_at_first) break;
  }
  print_hits();
  return right ? 0 : kExitWrong;
}

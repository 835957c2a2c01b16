// Fault records, the abort flag, and the bounded wait that writes them.
#pragma once
#include "context.hpp"

namespace megamoe {

// Numbers are part of the record; megamoe/faults.py has the words for them.
enum class FaultKind : uint32_t { input = 1, overflow, timeout, in_use, token_count };
enum class WaitFor : uint32_t { nothing = 0, routes = 1, route_chunks, table, rows, l1_tiles, expert_done };

struct Fault {
  FaultKind kind;
  WaitFor wait;
  uint32_t peer;   // the rank that was waited for, or this rank
  uint32_t index;  // expert, pool block or token, by what was waited for
  uint64_t expected;
  uint64_t seen;
  uint64_t waited_ns;
};

MEGAMOE_FN void put_u64(uint32_t* record, FaultWord low, uint64_t value) {
  record[uint32_t(low)] = uint32_t(value);
  record[uint32_t(low) + 1] = uint32_t(value >> 32);
}

// Write a record on this rank. The first kMaxFaultRecords of a buffer are kept, all are counted.
MEGAMOE_FN void record_fault(const Context& context, const Fault& fault) {
  const auto& layout = *context.layout;
  const uint32_t slot = SystemRef<uint32_t>(*context.own<uint32_t>(layout.fault_count)).fetch_add(1, acquire_release);
  if (slot < kMaxFaultRecords) {
    uint32_t* record = context.own<uint32_t>(layout.fault_records) + slot * layout.fault_records.stride[0];
    record[uint32_t(FaultWord::kind)] = uint32_t(fault.kind);
    record[uint32_t(FaultWord::wait)] = uint32_t(fault.wait);
    record[uint32_t(FaultWord::rank)] = context.rank;
    record[uint32_t(FaultWord::peer)] = fault.peer;
    record[uint32_t(FaultWord::index)] = fault.index;
    put_u64(record, FaultWord::epoch_low, context.epoch);
    put_u64(record, FaultWord::expected_low, fault.expected);
    put_u64(record, FaultWord::seen_low, fault.seen);
    put_u64(record, FaultWord::waited_us_low, fault.waited_ns / 1000);
    SystemRef<uint32_t>(record[uint32_t(FaultWord::written)]).store(1, release);
  }
  SystemRef<uint64_t>(context.host_status->fault_count).fetch_add(1, release);
}

MEGAMOE_FN bool aborted(const Context& context) {
  return SystemRef<uint64_t>(*context.own<uint64_t>(context.layout->abort)).load(relaxed) != 0;
}

// Tell every rank to drain. Stays until the host resets the group.
MEGAMOE_FN void raise_abort(const Context& context) {
  for (uint32_t step = 0; step < context.problem->num_ranks; ++step) {
    const uint32_t other = (context.rank + step) % context.problem->num_ranks;
    SystemRef<uint64_t>(*context.peer<uint64_t>(other, context.layout->abort)).store(context.epoch, release);
  }
  SystemRef<uint64_t>(context.host_status->aborted_epoch).store(context.epoch, release);
}

// Who waits only because somebody else waits lets that one speak first, so that the record names the cause: a rank's own
// workers come after the routes of its peers, and finished experts, which hang on everything, come last.
MEGAMOE_FN constexpr uint64_t grace_ns(WaitFor wait) {
  return wait == WaitFor::routes ? 0 : wait == WaitFor::expert_done ? 200'000'000 : 100'000'000;
}

constexpr uint32_t kPollsPerLook = 16;  // polls between two looks at the clock and the abort flag

// How slow polling may become, see pause(). Finished experts are awaited by nearly every warp of the GPU.
MEGAMOE_FN uint32_t pause_doublings(const Context& context, WaitFor wait) {
  constexpr uint32_t quick = 2, calm = 4, slow = 6;
  constexpr uint32_t few_tokens = 16, many_tokens = 1024;
  if (wait != WaitFor::expert_done || context.num_tokens <= few_tokens) return quick;
  return context.num_tokens < many_tokens ? calm : slow;
}

// How long one wait has lasted.
struct Patience {
  uint64_t started = 0;  // 0: at the first poll
  uint32_t polls = 0;
};

// After a poll that came too early. True when the wait ends here: the deadline passed (a record was written, every rank
// told), or another wait aborted the launch.
MEGAMOE_FN bool gives_up(const Context& context, Patience& patience, Fault fault, uint64_t seen) {
  if (patience.polls++ % kPollsPerLook != 0) return false;
  if (aborted(context)) return true;
  const uint64_t now = now_ns();
  if (patience.started == 0) patience.started = now;
  if (now - patience.started <= context.timeout_ns + grace_ns(fault.wait)) return false;
  fault.seen = seen;
  fault.waited_ns = now - patience.started;
  record_fault(context, fault);
  raise_abort(context);
  return true;
}

template <class T>
struct Waited {
  bool reached;
  T seen;  // the value, acquired, when reached
  MEGAMOE_FN explicit operator bool() const { return reached; }
};

// Wait until `reached(word)`. Called by one thread. Not reached means that the launch drains, because the deadline
// passed (a record was written, every rank told) or because another wait already aborted it.
// Acquires at every poll: the other form, relaxed polls and one acquire at the end, costs a second load at every
// step of a launch; what a poll flushes on the GPU is the L1 cache, which holds little here.
// `started` is the time from which the deadline counts, for waits that share one; 0: from now.
template <class Ref, class Reached>
MEGAMOE_FN auto wait_until(const Context& context, Ref word, Reached reached, Fault fault, uint64_t started = 0)
    -> Waited<decltype(word.load(relaxed))> {
  perturb(Point::wait);
  constexpr auto order = mutated(Mutation::relaxed_wait) ? relaxed : acquire;
  const uint32_t doublings = pause_doublings(context, fault.wait);
  Patience patience{started};
  for (;;) {
    const auto seen = word.load(order);
    if (reached(seen)) return {true, seen};
    if (gives_up(context, patience, fault, uint64_t(seen))) return {false, seen};
    pause(patience.polls, doublings);
  }
}

enum class Look : uint32_t { reached, not_yet, drains };

// The same wait, one poll of it, for a thread that has other work meanwhile.
template <class Ref, class Reached>
MEGAMOE_FN Look look_at(const Context& context, Ref word, Reached reached, const Fault& fault, Patience& patience) {
  const auto seen = word.load(mutated(Mutation::relaxed_wait) ? relaxed : acquire);
  if (reached(seen)) return Look::reached;
  return gives_up(context, patience, fault, uint64_t(seen)) ? Look::drains : Look::not_yet;
}

}  // namespace megamoe

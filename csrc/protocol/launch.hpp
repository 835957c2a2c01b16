// A launch on a rank's buffer: let in or refused, counted, its counters cleared for the next, and ended.
#pragma once
#include "faults.hpp"
#include "team.hpp"

namespace megamoe {

enum class Entry : uint32_t { undecided = 0, run = 1, refused = 2 };

constexpr uint64_t kEntryBits = 2;

MEGAMOE_FN uint64_t* decision_slot(const Context& context, uint64_t launch) {
  const Region& decisions = context.layout->launch_decisions;
  return context.own<uint64_t>(decisions) + launch % kLaunchDecisionSlots * decisions.stride[0];
}

// The first worker of a launch decides for all of them, so that a launch runs whole or not at all. `launch` is unique
// among launches that can overlap, not 0 and below 2^62. Called by one thread of each worker, with context.epoch not yet
// set; afterwards context.epoch is this launch's, or for a refused one that of the launch in the way.
//
// The decision stays in its slot until every worker has said acknowledge_entry(): a worker that found the slot taken over
// would decide again. So launches that share a slot wait for each other's workers to come in, and for nothing else.
MEGAMOE_FN Entry enter_launch(Context& context, uint64_t launch) {
  perturb(Point::enter);
  SystemRef<uint64_t> in_use(*context.own<uint64_t>(context.layout->in_use));
  DeviceRef<uint64_t> epoch(*context.own<uint64_t>(context.layout->epoch));
  DeviceRef<uint64_t> decision(decision_slot(context, launch)[0]);
  const uint64_t undecided = launch << kEntryBits;
  uint64_t seen = 0;  // the first exchange finds out
  while (seen >> kEntryBits != launch) {
    if (seen != 0) {
      pause(0, 0);
      seen = decision.load(acquire);
    } else if (decision.compare_exchange_weak(seen, undecided, acquire, acquire)) {
      uint64_t free = 0;
      const bool entered = in_use.compare_exchange_strong(free, launch, acquire, acquire);
      if (!entered) {
        context.epoch = epoch.load(relaxed) + 1;
        record_fault(context, {FaultKind::in_use, WaitFor::nothing, context.rank, 0, 0, context.epoch, 0});
      }
      seen = undecided | uint64_t(entered ? Entry::run : Entry::refused);
      decision.store(seen, release);
    }
  }
  while (seen == undecided) {  // the decider runs already and waits for nobody
    pause(0, 0);
    seen = decision.load(acquire);
  }
  context.epoch = epoch.load(relaxed) + 1;
  return Entry(seen & ((1u << kEntryBits) - 1));
}

// Once by each of the `num_workers` workers, after enter_launch() and before it leaves; by any of its threads, beside other
// work. The last one frees the slot.
MEGAMOE_FN void acknowledge_entry(const Context& context, uint64_t launch, uint32_t num_workers) {
  uint64_t* slot = decision_slot(context, launch);
  DeviceRef<uint64_t> decision(slot[0]), readers(slot[1]);
  if (readers.fetch_add(1, acquire_release) + 1 != num_workers) return;
  readers.store(0, relaxed);
  decision.store(0, release);
}

// One release carries all that the workers did, which the last of them acquired, and the epoch: whoever finds the buffer free
// again, or on the host the epoch completed, finds that too. The two words themselves are in no order, and need none: a launch
// that finds the buffer free completes much later than a store arrives.
MEGAMOE_FN void end_launch(const Context& context) {
  DeviceRef<uint64_t>(*context.own<uint64_t>(context.layout->epoch)).store(context.epoch, relaxed);
  fence_before_releases();
  SystemRef<uint64_t>(context.host_status->completed_epoch).store(context.epoch, fenced_release);
  SystemRef<uint64_t>(*context.own<uint64_t>(context.layout->in_use)).store(0, fenced_release);
}

// The last worker to leave ends the launch; `drained(context)` is called by its whole team if the group was aborted.
template <class Team, class Drained>
MEGAMOE_FN void leave_launch(const Context& context, Team& team, uint32_t num_workers, Drained drained) {
  perturb(Point::leave);
  team.sync();
  const bool one_early = mutated(Mutation::exit_before_last_worker) && num_workers > 1;
  const uint32_t awaited = num_workers - (one_early ? 1 : 0);
  const uint64_t abort_epoch = team.once([&]() -> uint64_t {  // 0 too for whoever is not the last
    if (!finish(context, Claim::exited_workers, awaited)) return 0;
    const uint64_t seen = SystemRef<uint64_t>(*context.own<uint64_t>(context.layout->abort)).load(acquire);
    if (seen == 0) end_launch(context);
    return seen;
  });
  if (abort_epoch == 0) return;
  drained(context);
  team.sync();
  if (team.rank() != 0) return;
  SystemRef<uint64_t>(context.host_status->aborted_epoch).store(abort_epoch, relaxed);
  end_launch(context);
}

constexpr uint32_t kWordsPerClear = 4096;

// Clear, by claim, the bank that the next launch counts in. The last launch's counters stay readable until then.
template <class Team>
MEGAMOE_FN void clear_other_bank(const Context& context, Team& team) {
  if constexpr (mutated(Mutation::bank_not_cleared)) return;
  const auto& layout = *context.layout;
  const uint32_t bank = context.other_bank();
  const uint32_t counter_bank = mutated(Mutation::wrong_bank_cleared) ? context.bank() : bank;
  struct Part {
    uint32_t* words;
    uint64_t count;
  };
  const auto part = [&](const Region& region, uint32_t of_bank, uint32_t words_per_item) {
    return Part{context.own<uint32_t>(region) + of_bank * region.stride[0] * words_per_item,
                region.stride[0] * words_per_item};
  };
  const Part parts[4] = {part(layout.l1_arrival_count, counter_bank, 1), part(layout.l2_arrival_mask, counter_bank, 2),
                         part(layout.expert_progress, counter_bank, 1), part(layout.claims, bank, 1)};
  uint64_t total = 0;
  for (const Part& piece : parts) total += piece.count;
  const uint32_t chunks = uint32_t((total + kWordsPerClear - 1) / kWordsPerClear);
  for (;;) {
    const uint32_t chunk = team.once([&] { return take(context, Claim::clear); });
    if (chunk >= chunks) return;
    const uint64_t first = uint64_t(chunk) * kWordsPerClear;
    for (uint64_t i = first + team.rank(); i < first + kWordsPerClear && i < total; i += team.size()) {
      uint64_t word = i;
      for (const Part& piece : parts) {  // unrolled: an index that varies would put the parts into local memory
        if (word < piece.count) {
          DeviceRef<uint32_t>(piece.words[word]).store(0, relaxed);
          break;
        }
        word -= piece.count;
      }
    }
    team.sync();
  }
}

}  // namespace megamoe

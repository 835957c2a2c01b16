// A team is the set of threads that works on one claim together. The protocol asks of it:
//   rank(), size()               this thread's place
//   sync()                       barrier over the team, which also orders memory within it
//   once(f)                      the first thread runs f; every thread gets the result, ordered after what f saw
//   all(flag)                    whether the flag holds in every thread; orders memory like sync()
//   exclusive_sum(value)         the sum of the values of the threads before this one, and of all
// and of a team that sorts routes or builds a table:
//   scratch()                    a RouteScratch that the whole team reads and writes
//   number_equal(n, first)       each of scratch().words[0..n) whose expert is first + e, e < kExpertWindow, gets into its upper
//                                bits how many of its part and expert come before it, and counts[part][e] grows by their
//                                number; between barriers of the caller
// A GPU target builds teams from warps. One thread is a team too.
#pragma once
#include "primitives.hpp"

namespace megamoe {

constexpr uint32_t kRouteParts = 4;  // of a chunk, each numbered for itself: so many warps number side by side
constexpr uint32_t kRoutesPerPart = kRoutesPerChunk / kRouteParts;
constexpr uint32_t kExpertWindow = 256;  // experts whose routes are counted at a time
constexpr uint32_t kIdBits = 24;
constexpr uint32_t kIdMask = (1u << kIdBits) - 1;  // as an expert: none
static_assert(kRoutesPerChunk % kRouteParts == 0 && kRoutesPerPart <= 1u << (32 - kIdBits));
static_assert(kMaxExperts < kIdMask - kExpertWindow);

struct RouteScratch {
  uint32_t words[kRoutesPerChunk];             // of a route: its expert, and above kIdBits its number among equal ones
  uint16_t counts[kRouteParts][kExpertWindow];  // routes of a part, later of all parts up to it
  uint32_t places[kExpertWindow];              // where the chunk's routes of an expert begin in the list
};

struct PartialSum {
  uint32_t before, total;
};

struct SoloTeam {
  RouteScratch routes;

  MEGAMOE_FN RouteScratch& scratch() { return routes; }
  MEGAMOE_FN static constexpr uint32_t rank() { return 0; }
  MEGAMOE_FN static constexpr uint32_t size() { return 1; }
  MEGAMOE_FN static void sync() {}
  template <class Function>
  MEGAMOE_FN static auto once(Function function) {
    return function();
  }
  MEGAMOE_FN static bool all(bool flag) { return flag; }
  MEGAMOE_FN static PartialSum exclusive_sum(uint32_t value) { return {0, value}; }
  MEGAMOE_FN void number_equal(uint32_t count, uint32_t first_expert) {
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t expert = (routes.words[i] & kIdMask) - first_expert;
      if (expert >= kExpertWindow) continue;
      routes.words[i] |= uint32_t(routes.counts[i / kRoutesPerPart][expert]++) << kIdBits;
    }
  }
};

}  // namespace megamoe

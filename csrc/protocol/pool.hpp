// At the owner: what is known of the pool. Rows are ordered by (local expert, (source - me) mod R, token, slot); every expert
// starts on a block boundary; the order never depends on timing.
#pragma once
#include "faults.hpp"
#include "team.hpp"

namespace megamoe {

struct alignas(8) PoolBlock {
  uint32_t expert;  // local
  uint32_t rows;    // in use; the rest of the block is padding
};

MEGAMOE_FN uint32_t rotated_source(const Context& context, uint32_t step) {
  const uint32_t source = context.rank + step, ranks = context.problem->num_ranks;
  return source < ranks ? source : source - ranks;
}
MEGAMOE_FN PoolBlock* pool_blocks(const Context& context) {
  return context.own<PoolBlock>(context.layout->pool_blocks);
}
// Rows of an expert that come from the sources before `step`, in pool order.
MEGAMOE_FN uint32_t* source_rows(const Context& context, uint32_t expert) {
  return context.own<uint32_t>(context.layout->source_rows) + expert * context.layout->source_rows.stride[0];
}
MEGAMOE_FN uint32_t* expert_blocks(const Context& context) {
  return context.own<uint32_t>(context.layout->expert_blocks);
}
MEGAMOE_FN uint32_t expert_rows(const Context& context, uint32_t expert) {
  return source_rows(context, expert)[context.problem->num_ranks];
}

}  // namespace megamoe

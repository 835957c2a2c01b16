// C entry points of the host target, called from Python by ctypes.
#include <chrono>
#include <new>
#include <system_error>

#include "stream.hpp"

using megamoe::BufferLayout;
using megamoe::HostStatus;
using megamoe::LaunchArguments;
using megamoe::Problem;
using megamoe::host::Rank;
using megamoe::host::Stream;

extern "C" {

void* megamoe_rank_create(const Problem* problem, const BufferLayout* layout, uint32_t rank, uint8_t* const* bases,
                          HostStatus* host_status) {
  return new Rank{*problem, *layout, rank, std::vector<uint8_t*>(bases, bases + problem->num_ranks), host_status};
}
void megamoe_rank_destroy(void* rank) { delete static_cast<Rank*>(rank); }

// Null where the system gives no more threads, or no memory for them.
void* megamoe_stream_create(uint32_t num_workers) try {
  return new Stream(num_workers);
} catch (const std::system_error&) {
  return nullptr;
} catch (const std::bad_alloc&) {
  return nullptr;
}
// Ends the workers after the launches that were submitted.
void megamoe_stream_destroy(void* stream) { delete static_cast<Stream*>(stream); }

uint64_t megamoe_launch(void* stream, const void* rank, const LaunchArguments* arguments) {
  return static_cast<Stream*>(stream)->launch(static_cast<const Rank*>(rank), *arguments);
}
int megamoe_wait(void* stream, uint64_t ticket, uint64_t timeout_ns) {
  return static_cast<Stream*>(stream)->wait(ticket, timeout_ns) ? 1 : 0;
}

// For tests of the protocol's arithmetic and of the generated structs.
uint64_t megamoe_tile_count(uint32_t blocks, uint32_t l1_tiles, uint32_t l2_tiles, uint32_t group, uint32_t lag) {
  return megamoe::TileOrder{blocks, l1_tiles, l2_tiles, group, lag}.count();
}
void megamoe_tile_at(uint32_t blocks, uint32_t l1_tiles, uint32_t l2_tiles, uint32_t group, uint32_t lag,
                     uint32_t index, uint32_t* kind_block_column) {
  const auto tile = megamoe::TileOrder{blocks, l1_tiles, l2_tiles, group, lag}.at(index);
  kind_block_column[0] = uint32_t(tile.kind);
  kind_block_column[1] = tile.unit;
  kind_block_column[2] = tile.column;
}
uint8_t megamoe_to_e4m3(float value) { return megamoe::host::to_e4m3(value); }
float megamoe_from_e4m3(uint8_t bits) { return megamoe::host::kE4m3.value[bits]; }
uint16_t megamoe_to_bf16(float value) { return megamoe::host::to_bf16(value); }
}

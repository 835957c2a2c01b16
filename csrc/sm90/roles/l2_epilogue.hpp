// L2 epilogue, one warpgroup: bf16 results of its part of a tile into the combine buffers of the rows' sources.
#pragma once
#include "ptx/store.hpp"
#include "roles/l1_epilogue.hpp"

namespace megamoe::sm90 {

// Two short groups of columns in one word of each of four lanes become 16 bytes of one row in one lane.
template <uint32_t kPieces, class Shared>
MEGAMOE_FN void scatter_results(const Context& context, const Shared& shared, const TileResult& tile,
                                const float (&sums)[kPieces * kSumsPerPiece]) {
  constexpr bool tall = kPieces == 2;
  const ThreadPlace place = ThreadPlace::here();
  const Region& region = context.layout->combine;
  const uint32_t first_column = tile.column * kBlockN + (tall ? 0 : place.warpgroup * kPieceN);
#pragma unroll
  for (uint32_t r = 0; r < 2; ++r) {
    const uint32_t row = place.first_row(tall) + 8 * r;
    const bool valid = row < tile.rows;
    const uint32_t* target = shared.targets[place.warpgroup].metadata[place.first_row(false) + 8 * r];
    // A row beyond the tile's has whatever metadata lies there: its rank may not be looked up.
    uint16_t* to = context.peer<uint16_t>(valid ? target[0] : context.rank, region) + target[2] * region.stride[0] +
                   target[1] * region.stride[1] + first_column + place.lane % 4 * 8;
#pragma unroll
    for (uint32_t piece = 0; piece < kPieces; ++piece) {
      if ((tall ? piece : uniform(place.warpgroup)) >= tile.pieces) break;
#pragma unroll
      for (uint32_t batch = 0; batch < kPieceN / 32; ++batch) {
        uint32_t words[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          const float* pair = &sums[piece * kSumsPerPiece + 4 * (4 * batch + i) + 2 * r];
          words[i] = to_bf16x2(pair[0], pair[1]);
        }
        transpose_quad(words, place.lane);
        store_if(valid, to + piece * kPieceN + batch * 32, make_uint4(words[0], words[1], words[2], words[3]));
      }
    }
  }
}

}  // namespace megamoe::sm90

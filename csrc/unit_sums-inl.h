// SPDX-License-Identifier: Apache-2.0
// Sums on a matrix unit (matrix_unit.h). Included inside the namespace of an instruction set, with TARGET defined.

// Where the tiles of A or B lie: bytes between two lines, to the next 64 along the sum, and to the second
// tile of a pair.
struct UnitTiles {
  const void* first;
  std::int64_t line, step, second;
};

struct Nothing {
  void operator()() {}
};

// Tile C of 2 x 2 tiles at `sums` [.., row_step].
template <int C>
static inline std::int32_t* unit_tile_of(std::int32_t* sums, std::int64_t row_step) {
  return sums + C / 2 * unit_tile * row_step + C % 2 * unit_tile;
}

// Stores M x N tiles, or none if `sums` is null.
template <int M, int N, class Unit>
static inline void store_unit_sums(Unit& unit, std::int32_t* sums, std::int64_t row_step) {
  if (!sums) return;
  unit.template store<0>(unit_tile_of<0>(sums, row_step), row_step * 4);
  if constexpr (N == 2) unit.template store<1>(unit_tile_of<1>(sums, row_step), row_step * 4);
  if constexpr (M == 2) unit.template store<2>(unit_tile_of<2>(sums, row_step), row_step * 4);
  if constexpr (M == 2 && N == 2) unit.template store<3>(unit_tile_of<3>(sums, row_step), row_step * 4);
}

// M x N tiles of sums over `steps` times 64 bytes, added to those at `sums` [.., row_step] where `from_zero` is false.
// With PASS, A and the sums bypass the L1 cache, which is B's. The tiles that are `held` are stored while these are
// begun, so that neither waits for the other. `work` is called after each product: what vectors do meanwhile costs
// little.
// The fields of a and b are read one by one: a load that spans several recent stores waits until these have left the
// store buffer, behind the tiles.
template <int M, int N, bool PASS, class Unit, class Work>
TARGET __attribute__((noinline)) static void unit_tiles_of_sums(Unit& unit, const UnitTiles& a, const UnitTiles& b,
                                                                std::int64_t steps, bool from_zero, std::int32_t* sums,
                                                                std::int64_t row_step, std::int32_t* held, Work& work) {
  Work between = work;
  const std::int64_t bytes = row_step * 4, a_line = a.line, b_line = b.line, a_step = a.step, b_step = b.step;
  const auto *a_first = static_cast<const std::uint8_t*>(a.first), *b_first = static_cast<const std::uint8_t*>(b.first);
  const std::uint8_t *a_second = a_first + a.second, *b_second = b_first + b.second;
#define UNIT_PRODUCT(C, A, B)                                                                             \
  if constexpr (C / 2 < M && C % 2 < N) {                                                                 \
    if (is_first) {                                                                                       \
      if (held) unit.template store<C>(unit_tile_of<C>(held, row_step), bytes);                           \
      from_zero ? unit.template zero<C>() : unit.template load<C, PASS>(unit_tile_of<C>(sums, row_step), bytes); \
    }                                                                                                     \
    unit.template multiply<C, A, B>();                                                                    \
    between();                                                                                            \
  }
  const auto step = [&](bool is_first) TARGET __attribute__((always_inline)) {
    unit.template load<4, PASS>(a_first, a_line);
    if constexpr (M == 2) unit.template load<5, PASS>(a_second, a_line);
    unit.template load<6>(b_first, b_line);
    UNIT_PRODUCT(0, 4, 6)
    UNIT_PRODUCT(2, 5, 6)
    if constexpr (N == 2) unit.template load<7>(b_second, b_line);
    UNIT_PRODUCT(1, 4, 7)
    UNIT_PRODUCT(3, 5, 7)
    a_first += a_step, a_second += a_step, b_first += b_step, b_second += b_step;
  };
#undef UNIT_PRODUCT
  step(true);
  while (--steps > 0) step(false);
  work = between;
}

// The same of m lines of A and n columns of B, 1 to 32 each, in whole tiles. Afterwards `held` is `sums` if the unit
// holds them, which it does of 2 x 2 tiles, and else null.
template <bool PASS, class Unit, class Work>
TARGET static inline void unit_sums(Unit& unit, std::int64_t m, std::int64_t n, const UnitTiles& a, const UnitTiles& b,
                                    std::int64_t steps, bool from_zero, std::int32_t* sums, std::int64_t row_step,
                                    std::int32_t*& held, Work& work) {
  if (m > unit_tile && n > unit_tile) {
    unit_tiles_of_sums<2, 2, PASS>(unit, a, b, steps, from_zero, sums, row_step, held, work);
    held = sums;
    return;
  }
  store_unit_sums<2, 2>(unit, held, row_step);
  held = nullptr;
  if (n > unit_tile) {
    unit_tiles_of_sums<1, 2, PASS>(unit, a, b, steps, from_zero, sums, row_step, held, work);
    store_unit_sums<1, 2>(unit, sums, row_step);
  } else if (m > unit_tile) {
    unit_tiles_of_sums<2, 1, PASS>(unit, a, b, steps, from_zero, sums, row_step, held, work);
    store_unit_sums<2, 1>(unit, sums, row_step);
  } else {
    unit_tiles_of_sums<1, 1, PASS>(unit, a, b, steps, from_zero, sums, row_step, held, work);
    store_unit_sums<1, 1>(unit, sums, row_step);
  }
}

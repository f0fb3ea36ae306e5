// SPDX-License-Identifier: Apache-2.0
// AMX on a processor that has none, or in a process that lacks the system's permission: its instructions end in
// SIGILL, whose handler decodes them and does what Intel's manual says (Software Developer's Manual, volume 2:
// LDTILECFG, TILELOADD, TDPBSSD, ...). Only what matrix_unit.h writes is known: anything else, or a shape that no
// tile may have, ends the program.

#pragma once

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

namespace amx_trap {

// Whether the system has switched tiles on for processes with permission (XCR0). Then LDTILECFG and TILERELEASE run
// without one (volume 1, "Extended Feature Disable"): the handler never sees a shape, and takes that of matrix_unit.h.
inline bool processor_configures() {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low >> 17 & 3) == 3;
}

struct Tiles {
  bool configured = processor_configures();
  std::int64_t line_bytes[8] = {64, 64, 64, 64, 64, 64, 64, 64}, lines[8] = {16, 16, 16, 16, 16, 16, 16, 16};
  std::uint8_t bytes[8][16][64] = {};
};
inline thread_local Tiles tiles;
inline long products = 0;

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("emulated AMX: %s\n", what);
  std::_Exit(1);
}

// Registers in the order of their numbers in instructions.
inline std::int64_t value_of(const ucontext_t& context, int number) {
  constexpr int places[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                            REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context.uc_mcontext.gregs[places[number]];
}

struct Operand {
  std::int64_t base = 0, index = 0;  // the index, scaled: the stride of tile loads
  int bytes = 0;                     // of the instruction behind its opcode

  Operand(const ucontext_t& context, const std::uint8_t* at, bool extend_base, bool extend_index) {
    const int mode = at[0] >> 6, rm = at[0] & 7;
    bytes = 1;
    int base_number = rm | extend_base << 3;
    if (rm == 4) {
      const int index_number = (at[1] >> 3 & 7) | extend_index << 3;
      base_number = (at[1] & 7) | extend_base << 3;
      if (index_number != 4) index = value_of(context, index_number) << (at[1] >> 6);
      bytes = 2;
    }
    require(mode != 0 || (base_number & 7) != 5, "an address without a register");
    base = value_of(context, base_number);
    if (mode == 1) base += std::int8_t(at[bytes]);
    std::int32_t far = 0;
    if (mode == 2) std::memcpy(&far, at + bytes, 4);
    base += far;
    bytes += mode == 1 ? 1 : mode == 2 ? 4 : 0;
  }
};

inline void configure(const std::uint8_t* shape) {
  require(shape[0] == 1 && shape[1] == 0, "palette 1 from line 0 on is the only one");
  for (int i = 2; i < 16; ++i) require(shape[i] == 0, "reserved bytes are zero");
  for (int t = 0; t < 8; ++t) {
    std::uint16_t line_bytes;
    std::memcpy(&line_bytes, shape + 16 + 2 * t, 2);
    tiles.line_bytes[t] = line_bytes;
    tiles.lines[t] = shape[48 + t];
    require(line_bytes <= 64 && line_bytes % 4 == 0 && shape[48 + t] <= 16, "a tile is 16 x 64 bytes at most");
  }
  for (int i = 32; i < 48; ++i) require(shape[i] == 0, "only eight tiles");
  for (int i = 56; i < 64; ++i) require(shape[i] == 0, "only eight tiles");
  std::memset(tiles.bytes, 0, sizeof tiles.bytes);
  tiles.configured = true;
}

inline void multiply(int c, int a, int b) {
  const std::int64_t depth = tiles.line_bytes[a] / 4;
  require(tiles.lines[c] == tiles.lines[a] && tiles.line_bytes[c] == tiles.line_bytes[b] &&
              depth == tiles.lines[b] && c != a && c != b && a != b, "tiles of a product that do not fit together");
  for (int m = 0; m < tiles.lines[c]; ++m) {
    for (int n = 0; n < tiles.line_bytes[c] / 4; ++n) {
      std::uint32_t sum;
      std::memcpy(&sum, &tiles.bytes[c][m][4 * n], 4);
      for (int k = 0; k < depth; ++k) {
        for (int i = 0; i < 4; ++i) {
          sum += std::uint32_t(std::int8_t(tiles.bytes[a][m][4 * k + i]) * std::int8_t(tiles.bytes[b][k][4 * n + i]));
        }
      }
      std::memcpy(&tiles.bytes[c][m][4 * n], &sum, 4);
    }
  }
  ++products;
}

// A three-byte VEX prefix, an opcode of the map 0F 38, ModRM.
inline void on_illegal_instruction(int, siginfo_t*, void* raw) {
  ucontext_t& context = *static_cast<ucontext_t*>(raw);
  greg_t& at = context.uc_mcontext.gregs[REG_RIP];
  const std::uint8_t* code = reinterpret_cast<const std::uint8_t*>(at);
  require(code[0] == 0xC4 && (code[1] & 31) == 2 && !(code[2] & 0x84), "an instruction that is not of AMX");
  const int prefix = code[2] & 3, opcode = code[3], modrm = code[4];
  const int tile = modrm >> 3 & 7, other = modrm & 7, third = ~code[2] >> 3 & 15;
  enum { none, x66, xF3, xF2 };
  const bool in_registers = modrm >> 6 == 3;
  int length = 5;
  if (opcode == 0x49 && !in_registers && prefix == none && tile == 0) {
    const Operand memory(context, code + 4, !(code[1] & 0x20), !(code[1] & 0x40));
    configure(reinterpret_cast<const std::uint8_t*>(memory.base + memory.index));
    length = 4 + memory.bytes;
  } else if (opcode == 0x49 && modrm == 0xC0 && prefix == none) {
    tiles.configured = false;
  } else {
    require(tiles.configured, "tiles are used before they have a shape");
    if (opcode == 0x49 && in_registers && prefix == xF2 && other == 0) {
      std::memset(tiles.bytes[tile], 0, sizeof tiles.bytes[tile]);
    } else if (opcode == 0x4B && !in_registers && other == 4 && prefix != none) {
      const Operand memory(context, code + 4, !(code[1] & 0x20), !(code[1] & 0x40));
      const bool stores = prefix == xF3;  // tileloadd has xF2, tileloaddt1 x66
      for (int i = 0; i < tiles.lines[tile]; ++i) {
        auto* line = reinterpret_cast<std::uint8_t*>(memory.base + i * memory.index);
        const auto size = std::size_t(tiles.line_bytes[tile]);
        if (!stores) std::memset(tiles.bytes[tile][i], 0, 64);
        std::memcpy(stores ? line : tiles.bytes[tile][i], stores ? tiles.bytes[tile][i] : line, size);
      }
      length = 4 + memory.bytes;
    } else if (opcode == 0x5E && in_registers && prefix == xF2) {
      multiply(tile, other, third);
    } else {
      require(false, "an instruction of AMX that matrix_unit.h does not write");
    }
  }
  at += length;
}

}  // namespace amx_trap

// From here on AMX's instructions work in this process, until it asks for permission to use the processor's.
inline void emulate_amx() {
  struct sigaction action = {};
  action.sa_sigaction = amx_trap::on_illegal_instruction;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGILL, &action, nullptr);
}

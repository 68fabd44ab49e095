// The log of a lane: its accesses since the lanes of its warp were last laid side by side.
#pragma once

#include "common/simt/xray.h"

namespace simt {

constexpr int LOG_ROWS =
    64;  // accesses a lane may log before the others catch up; 32 lanes' logs fit a first-level cache

// A log entry's key: where in the module, what, how wide. The place is 25 bits, modules are far below 32 MiB.
constexpr uint32_t make_key(uint32_t place, Op op, int log_size) {
  return place << 7 | uint32_t(op) << 3 | uint32_t(log_size);
}
inline Op op_of(uint32_t key) { return Op(key >> 3 & 15); }
inline int size_of(uint32_t key) { return 1 << (key & 7); }
inline uint64_t pc_of(uint32_t key) { return key >> 7; }

// Of a copy_load and a matrix_load a lane may read nothing; it says so in the topmost bit of the address, which no
// address needs.
constexpr uint64_t with_part(uint64_t address, bool reads) { return address << 1 >> 1 | uint64_t(!reads) << 63; }
constexpr uint64_t address_in(uint64_t logged) { return logged << 1 >> 1; }
constexpr bool takes_part(uint64_t logged) { return !(logged >> 63); }

struct Lane {
  uint32_t count, limit;
  uint64_t* address;
  uint32_t* key;
};

extern uintptr_t code_base;  // of the module, for the keys

// Of what orders blocks. (xray.cpp)
extern bool order_is_kept;  // the module has kernels that do: common/ordering.h is included
bool follow_word(Worker& worker, const void* address, uint32_t key);
bool hold_word(Worker& worker, const void* address);
void fence_order(Worker& worker);

}  // namespace simt

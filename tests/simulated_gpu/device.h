// What the parts of the simulated GPU share: its settings, its memory and its clock.
#pragma once

#include <cstddef>
#include <cstdint>

namespace simulated {

constexpr size_t kMiB = size_t{1} << 20;
constexpr int kMostGpus = 16;

struct Settings {
  int gpus;              // SIMULATED_GPUS, 1 by default
  size_t memory_bytes;   // SIMULATED_GPU_GIB of each, 80 by default
  size_t context_bytes;  // SIMULATED_CONTEXT_MIB that the first use of a GPU by a process takes, 426 by default
  int capability;        // SIMULATED_CAPABILITY: that of an A100, 80, by default
  bool has_values;       // SIMULATED_VALUES: copies are made; without, only those of at most 64 KiB
  int64_t lag;           // SIMULATED_LAG: an event completes so many launches after it was recorded, or at a wait
  int nccl_timeout_s;    // SIMULATED_NCCL_TIMEOUT_S: how long a collective waits for a rank, 600 by default
};

const Settings& settings();

// Memory of a GPU, in use by all processes that share SIMULATED_GPU_STATE (a name of shared memory), or by this one.
bool take(int gpu, size_t bytes);  // false: it is not there
void give_back(int gpu, size_t bytes);
size_t free_bytes(int gpu);
void make_context(int gpu);  // idempotent

int current_gpu();

// The clock of the simulated streams: one count of launches for all.
void launch();
int64_t launched();
void wait_for_all();
bool is_done(int64_t time);

}  // namespace simulated

// A stand-in for NCCL among processes of one machine. A collective blocks its caller until all ranks have called it.
//
// The data go through shared memory, a part at a time. Without values (see Settings) the ranks only meet.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <vector>

#include "device.h"

using namespace simulated;

namespace {

enum Result { kSuccess = 0, kSystemError = 2, kInvalidUsage = 5 };
enum Type { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kHalf, kFloat, kDouble, kBfloat };
enum Operation { kSum, kProduct, kMax, kMin, kAverage };
constexpr int kPremultiplied = 1000;  // of the operations that ncclRedOpCreatePreMulSum makes
constexpr int kMostRanks = 16;
constexpr size_t kSlotBytes = 1 << 20;

struct Id {
  char name[128];
};

constexpr size_t kBoxBytes = 1 << 16;

// A part of what one rank sends to another.
struct Box {
  std::atomic<uint32_t> is_full;
  char bytes[kBoxBytes];
};

struct Shared {
  std::atomic<uint32_t> arrived, turn;
  char slots[kMostRanks][kSlotBytes];
  Box boxes[kMostRanks][kMostRanks];  // by sender and receiver
};

struct Comm {
  Shared* shared;
  int ranks, rank;
  Id id;
  int children;
  std::atomic<bool> is_aborted;
};

std::vector<double>& factors() {
  static std::vector<double> all;
  return all;
}

size_t size_of(int type) {
  switch (type) {
    case kInt8: case kUint8: return 1;
    case kHalf: case kBfloat: return 2;
    case kInt32: case kUint32: case kFloat: return 4;
    case kInt64: case kUint64: case kDouble: return 8;
    default: return 1;  // 8-bit floats
  }
}

float from_bfloat(uint16_t bits) {
  uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
uint16_t to_bfloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return std::isnan(value) ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

double read(const char* at, int type, size_t i) {
  switch (type) {
    case kInt8: return reinterpret_cast<const int8_t*>(at)[i];
    case kUint8: return reinterpret_cast<const uint8_t*>(at)[i];
    case kInt32: return reinterpret_cast<const int32_t*>(at)[i];
    case kUint32: return reinterpret_cast<const uint32_t*>(at)[i];
    case kInt64: return static_cast<double>(reinterpret_cast<const int64_t*>(at)[i]);
    case kUint64: return static_cast<double>(reinterpret_cast<const uint64_t*>(at)[i]);
    case kHalf: return static_cast<double>(reinterpret_cast<const _Float16*>(at)[i]);
    case kFloat: return reinterpret_cast<const float*>(at)[i];
    case kBfloat: return from_bfloat(reinterpret_cast<const uint16_t*>(at)[i]);
    default: return reinterpret_cast<const double*>(at)[i];
  }
}

void write(char* at, int type, size_t i, double value) {
  switch (type) {
    case kInt8: reinterpret_cast<int8_t*>(at)[i] = static_cast<int8_t>(value); break;
    case kUint8: reinterpret_cast<uint8_t*>(at)[i] = static_cast<uint8_t>(value); break;
    case kInt32: reinterpret_cast<int32_t*>(at)[i] = static_cast<int32_t>(value); break;
    case kUint32: reinterpret_cast<uint32_t*>(at)[i] = static_cast<uint32_t>(value); break;
    case kInt64: reinterpret_cast<int64_t*>(at)[i] = static_cast<int64_t>(value); break;
    case kUint64: reinterpret_cast<uint64_t*>(at)[i] = static_cast<uint64_t>(value); break;
    case kHalf: reinterpret_cast<_Float16*>(at)[i] = static_cast<_Float16>(value); break;
    case kFloat: reinterpret_cast<float*>(at)[i] = static_cast<float>(value); break;
    case kBfloat: reinterpret_cast<uint16_t*>(at)[i] = to_bfloat(static_cast<float>(value)); break;
    default: reinterpret_cast<double*>(at)[i] = value;
  }
}

// Wait for all ranks. False: the communicator was aborted, or a rank did not come in time.
bool meet(Comm* comm) {
  using Clock = std::chrono::steady_clock;
  static const auto most = std::chrono::seconds(settings().nccl_timeout_s);
  auto deadline = Clock::now() + most;
  Shared& shared = *comm->shared;
  uint32_t turn = shared.turn;
  if (shared.arrived.fetch_add(1) + 1 == static_cast<uint32_t>(comm->ranks)) {
    shared.arrived = 0;
    shared.turn = turn + 1;
    return true;
  }
  for (int i = 0; shared.turn == turn; ++i) {
    if (comm->is_aborted || (i >= 1000 && Clock::now() > deadline)) return false;
    i < 1000 ? static_cast<void>(sched_yield()) : static_cast<void>(usleep(100));
  }
  return true;
}

// Element i of what the ranks have put into their slots, combined.
void combine(Comm* comm, char* to, size_t offset, size_t count, int type, int operation) {
  for (size_t i = 0; i < count; ++i) {
    auto value = [&](int rank) { return read(comm->shared->slots[rank] + offset, type, i); };
    double factor = operation >= kPremultiplied ? factors()[operation - kPremultiplied] : 1;
    double result = value(0) * factor;
    for (int rank = 1; rank < comm->ranks; ++rank) {
      double next = value(rank) * factor;
      switch (operation) {
        case kProduct: result *= next; break;
        case kMax: result = std::max(result, next); break;
        case kMin: result = std::min(result, next); break;
        default: result += next;
      }
    }
    write(to, type, i, operation == kAverage ? result / comm->ranks : result);
  }
}

// Ops between ncclGroupStart and ncclGroupEnd run at the end.
thread_local int groups = 0;
thread_local std::vector<std::function<int()>> waiting;

int run(std::function<int()> operation) {
  launch();
  if (groups == 0) return operation();
  waiting.push_back(std::move(operation));
  return kSuccess;
}

// What is left to send to a rank, or to receive from it.
struct Message {
  char* bytes;
  size_t left;
  Box* box;
  bool is_sent;
  Comm* comm;
};
thread_local std::vector<Message> messages;

// Send and receive all messages of a group: a rank may send to itself, or two ranks to each other.
int deliver() {
  auto all = std::move(messages);
  messages.clear();
  for (bool is_done = false; !is_done;) {
    is_done = true;
    for (Message& message : all) {
      if (message.left == 0) continue;
      is_done = false;
      if (message.comm->is_aborted) return kSystemError;
      if (message.box->is_full == static_cast<uint32_t>(message.is_sent)) continue;
      size_t bytes = std::min(message.left, kBoxBytes);
      message.is_sent ? std::memcpy(message.box->bytes, message.bytes, bytes)
                      : std::memcpy(message.bytes, message.box->bytes, bytes);
      message.bytes += bytes;
      message.left -= bytes;
      message.box->is_full = message.is_sent;
    }
    sched_yield();
  }
  return kSuccess;
}

int add_message(const void* bytes, size_t count, int type, Comm* comm, int peer, bool is_sent) {
  launch();
  auto& boxes = comm->shared->boxes;
  Box* box = is_sent ? &boxes[comm->rank][peer] : &boxes[peer][comm->rank];
  size_t size = count * size_of(type);
  if (!settings().has_values && size > 65536) size = 0;
  messages.push_back({const_cast<char*>(static_cast<const char*>(bytes)), size, box, is_sent, comm});
  return groups == 0 ? deliver() : kSuccess;
}

// Part by part, `put` fills this rank's slot, and `take` reads all slots. Both get the start of a part and its elements.
int exchange(
    Comm* comm, size_t elements, size_t most, const std::function<void(size_t, size_t)>& put,
    const std::function<void(size_t, size_t)>& take) {
  if (!settings().has_values && elements > 8192) elements = 0;
  for (size_t start = 0; start < std::max<size_t>(elements, 1); start += most) {
    size_t count = std::min(most, elements - std::min(elements, start));
    if (count) put(start, count);
    if (!meet(comm)) return kSystemError;
    if (count) take(start, count);
    if (!meet(comm)) return kSystemError;
  }
  return kSuccess;
}

// For `exchange`: fill this rank's slot with a part of `from`.
std::function<void(size_t, size_t)> put_own(Comm* comm, const char* from, size_t size) {
  return [=](size_t start, size_t n) {
    std::memcpy(comm->shared->slots[comm->rank], from + start * size, n * size);
  };
}

// An all-reduce, or a reduce to `root` alone.
int reduce(
    const char* from, char* to, size_t count, int type, int operation, Comm* comm, std::optional<int> root = {}) {
  size_t size = size_of(type);
  return run([=] {
    return exchange(comm, count, kSlotBytes / size, put_own(comm, from, size), [=](size_t start, size_t n) {
      if (!root || comm->rank == *root) combine(comm, to + start * size, 0, n, type, operation);
    });
  });
}

Comm* join(int ranks, const Id& id, int rank) {
  int file = shm_open(id.name, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) return nullptr;
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  auto* comm = new Comm{static_cast<Shared*>(memory), ranks, rank, id, 0, {}};
  meet(comm);
  if (rank == 0) shm_unlink(id.name);
  return comm;
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = 22907;
  return kSuccess;
}
int ncclGetUniqueId(Id* id) {
  std::random_device random;
  *id = {};
  std::snprintf(id->name, sizeof id->name, "/simulated-%08x%08x", random(), random());
  return kSuccess;
}
int ncclCommInitRankConfig(Comm** comm, int ranks, Id id, int rank, void*) {
  if (ranks > kMostRanks) return kInvalidUsage;
  *comm = join(ranks, id, rank);
  return *comm == nullptr ? kSystemError : kSuccess;
}
int ncclCommInitRank(Comm** comm, int ranks, Id id, int rank) {
  return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}
int ncclCommSplit(Comm* parent, int color, int key, Comm** comm, void*) {
  int values[2] = {color, key}, rank = 0, ranks = 0;
  std::memcpy(parent->shared->slots[parent->rank], values, sizeof values);
  if (!meet(parent)) return kSystemError;
  for (int other = 0; other < parent->ranks; ++other) {
    int theirs[2];
    std::memcpy(theirs, parent->shared->slots[other], sizeof theirs);
    if (theirs[0] != color) continue;
    ++ranks;
    rank += theirs[1] < key || (theirs[1] == key && other < parent->rank);
  }
  if (!meet(parent)) return kSystemError;
  *comm = nullptr;
  Id id = parent->id;
  size_t length = std::strlen(id.name);
  std::snprintf(id.name + length, sizeof id.name - length, "-%d-%d", parent->children++, color);
  if (color >= 0) *comm = join(ranks, id, rank);
  return kSuccess;
}
int ncclCommAbort(Comm* comm) {
  comm->is_aborted = true;
  return kSuccess;
}
int ncclCommDestroy(Comm*) { return kSuccess; }
int ncclCommFinalize(Comm*) { return kSuccess; }
int ncclCommGetAsyncError(Comm*, int* error) { return *error = kSuccess; }
int ncclCommCount(Comm* comm, int* count) {
  *count = comm->ranks;
  return kSuccess;
}
int ncclCommUserRank(Comm* comm, int* rank) {
  *rank = comm->rank;
  return kSuccess;
}
const char* ncclGetErrorString(int error) {
  return error == kSuccess ? "no error" : error == kSystemError ? "unhandled system error" : "invalid usage";
}
const char* ncclGetLastError(Comm*) { return ""; }
int ncclRedOpCreatePreMulSum(int* operation, void* factor, int type, int, Comm*) {
  factors().push_back(read(static_cast<char*>(factor), type, 0));
  *operation = kPremultiplied + static_cast<int>(factors().size()) - 1;
  return kSuccess;
}
int ncclGroupStart() {
  ++groups;
  return kSuccess;
}
int ncclGroupEnd() {
  if (--groups > 0) return kSuccess;
  auto operations = std::move(waiting);
  waiting.clear();
  for (auto& operation : operations) {
    if (int error = operation()) return error;
  }
  return deliver();
}

int ncclAllReduce(const char* from, char* to, size_t count, int type, int operation, Comm* comm, void*) {
  return reduce(from, to, count, type, operation, comm);
}
int ncclReduce(const char* from, char* to, size_t count, int type, int operation, int root, Comm* comm, void*) {
  return reduce(from, to, count, type, operation, comm, root);
}
int ncclReduceScatter(const char* from, char* to, size_t count, int type, int operation, Comm* comm, void*) {
  size_t size = size_of(type), most = kSlotBytes / size / comm->ranks;
  return run([=] {
    return exchange(
        comm, count, most,
        [=](size_t start, size_t n) {
          for (int rank = 0; rank < comm->ranks; ++rank) {
            std::memcpy(
                comm->shared->slots[comm->rank] + rank * most * size, from + (rank * count + start) * size, n * size);
          }
        },
        [=](size_t start, size_t n) {
          combine(comm, to + start * size, comm->rank * most * size, n, type, operation);
        });
  });
}
int ncclAllGather(const char* from, char* to, size_t count, int type, Comm* comm, void*) {
  size_t size = size_of(type);
  return run([=] {
    return exchange(comm, count, kSlotBytes / size, put_own(comm, from, size), [=](size_t start, size_t n) {
      for (int rank = 0; rank < comm->ranks; ++rank) {
        std::memcpy(to + (rank * count + start) * size, comm->shared->slots[rank], n * size);
      }
    });
  });
}
int ncclBroadcast(const char* from, char* to, size_t count, int type, int root, Comm* comm, void*) {
  size_t size = size_of(type);
  return run([=] {
    return exchange(
        comm, count, kSlotBytes / size,
        [=](size_t start, size_t n) {
          if (comm->rank == root) std::memcpy(comm->shared->slots[root], from + start * size, n * size);
        },
        [=](size_t start, size_t n) { std::memcpy(to + start * size, comm->shared->slots[root], n * size); });
  });
}
int ncclBcast(char* data, size_t count, int type, int root, Comm* comm, void* stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}
int ncclSend(const void* from, size_t count, int type, int peer, Comm* comm, void*) {
  return add_message(from, count, type, comm, peer, true);
}
int ncclRecv(void* to, size_t count, int type, int peer, Comm* comm, void*) {
  return add_message(to, count, type, comm, peer, false);
}
int ncclAlltoAll(const void*, void*, size_t, int, Comm*, void*) { return kInvalidUsage; }  // not simulated

}  // extern "C"

// A stand-in for the CUDA runtime: memory, streams and events of GPUs that do not exist.
//
// Device memory is host memory that is reserved, and backed only where it is written. Kernels are launched and do
// nothing. Everything happens at the call; an event counts as completed only a while later (see Settings::lag).
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "device.h"

namespace simulated {
namespace {

double number(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::atof(text);
}

// The GPUs that this process may see; their order in CUDA_VISIBLE_DEVICES plays no part.
int visible_gpus() {
  int gpus = static_cast<int>(number("SIMULATED_GPUS", 1));
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return gpus;
  std::string names = visible;
  return names.empty() ? 0 : std::min<int>(gpus, 1 + std::count(names.begin(), names.end(), ','));
}

// One process's memory on one GPU. The table is shared; a process that has died no longer counts.
struct Use {
  std::atomic<int32_t> pid;
  std::atomic<int32_t> gpu;
  std::atomic<uint64_t> bytes;
};
constexpr int kMostUses = 256;

Use* uses() {
  static Use* table = [] {
    constexpr size_t size = sizeof(Use) * kMostUses;
    const char* name = std::getenv("SIMULATED_GPU_STATE");
    int file = name == nullptr ? -1 : shm_open(name, O_CREAT | O_RDWR, 0600);
    if (name != nullptr && (file < 0 || ftruncate(file, size) != 0)) std::perror(name), std::abort();
    int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, file, 0);
    if (memory == MAP_FAILED) std::perror("simulated GPU"), std::abort();
    return static_cast<Use*>(memory);
  }();
  return table;
}

bool is_alive(int pid) { return kill(pid, 0) == 0 || errno == EPERM; }

Use& own_use(int gpu) {
  int pid = getpid();
  for (int i = 0; i < kMostUses; ++i) {
    if (uses()[i].pid == pid && uses()[i].gpu == gpu) return uses()[i];
  }
  for (int i = 0; i < kMostUses; ++i) {
    int32_t owner = uses()[i].pid;
    if (owner != 0 && is_alive(owner)) continue;
    if (!uses()[i].pid.compare_exchange_strong(owner, pid)) continue;
    uses()[i].bytes = 0;
    uses()[i].gpu = gpu;
    return uses()[i];
  }
  std::fprintf(stderr, "simulated GPU: more than %d processes\n", kMostUses), std::abort();
}

size_t used_bytes(int gpu) {
  size_t used = 0;
  for (int i = 0; i < kMostUses; ++i) {
    if (uses()[i].pid != 0 && uses()[i].gpu == gpu && is_alive(uses()[i].pid)) used += uses()[i].bytes;
  }
  return used;
}

std::atomic<int64_t> issued{0}, waited{0};
std::mutex lock;
thread_local int gpu_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) { return last_error = error; }

struct Block {
  size_t bytes;
  int gpu;  // -1: pinned host memory
};
std::map<uintptr_t, Block>& blocks() {
  static auto* map = new std::map<uintptr_t, Block>;
  return *map;
}

void* reserve(size_t bytes, int access) {
  void* memory = mmap(nullptr, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// The block that has the address, or nullptr. Call it with the lock.
const Block* block_of(const void* address) {
  auto after = blocks().upper_bound(reinterpret_cast<uintptr_t>(address));
  if (after == blocks().begin()) return nullptr;
  auto& [start, block] = *std::prev(after);
  return reinterpret_cast<uintptr_t>(address) < start + block.bytes ? &block : nullptr;
}

cudaError_t add_block(void** pointer, size_t bytes, int gpu) {
  void* memory = reserve(bytes, PROT_READ | PROT_WRITE);
  if (memory == nullptr) return fail(cudaErrorMemoryAllocation);
  std::lock_guard<std::mutex> guard(lock);
  blocks()[reinterpret_cast<uintptr_t>(memory)] = {bytes, gpu};
  *pointer = memory;
  return cudaSuccess;
}

cudaError_t remove_block(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  std::lock_guard<std::mutex> guard(lock);
  auto found = blocks().find(reinterpret_cast<uintptr_t>(pointer));
  if (found == blocks().end()) return fail(cudaErrorInvalidValue);
  auto [bytes, gpu] = found->second;
  blocks().erase(found);
  munmap(pointer, bytes);
  if (gpu >= 0) give_back(gpu, bytes);
  return cudaSuccess;
}

bool is_made(size_t bytes) { return settings().has_values || bytes <= 64 * 1024; }

cudaError_t copy(void* to, const void* from, size_t bytes) {
  if (is_made(bytes)) std::memmove(to, from, bytes);
  return cudaSuccess;
}

}  // namespace

const Settings& settings() {
  static const Settings read{
      visible_gpus(),
      static_cast<size_t>(number("SIMULATED_GPU_GIB", 80) * 1024 * kMiB),
      static_cast<size_t>(number("SIMULATED_CONTEXT_MIB", 426) * kMiB),
      static_cast<int>(number("SIMULATED_CAPABILITY", 80)),
      number("SIMULATED_VALUES", 0) != 0,
      static_cast<int64_t>(number("SIMULATED_LAG", 20)),
      static_cast<int>(number("SIMULATED_NCCL_TIMEOUT_S", 600)),
  };
  return read;
}

bool take(int gpu, size_t bytes) {
  Use& use = own_use(gpu);
  use.bytes += bytes;  // first, so that two processes cannot both take the last bytes
  if (used_bytes(gpu) <= settings().memory_bytes) return true;
  use.bytes -= bytes;
  return false;
}

void give_back(int gpu, size_t bytes) { own_use(gpu).bytes -= bytes; }

size_t free_bytes(int gpu) {
  size_t used = used_bytes(gpu);
  return used >= settings().memory_bytes ? 0 : settings().memory_bytes - used;
}

void make_context(int gpu) {
  static std::atomic<bool> made[kMostGpus];
  if (!made[gpu].exchange(true)) take(gpu, settings().context_bytes);
}

int current_gpu() { return gpu_of_thread; }
void launch() { ++issued; }
int64_t launched() { return issued; }
void wait_for_all() { waited = issued.load(); }
bool is_done(int64_t time) { return time <= waited || time + settings().lag <= issued; }

}  // namespace simulated

using namespace simulated;

struct Event {
  std::atomic<int64_t> time{-1};
  std::atomic<int> queries{0};
};

// Queries of an event that is not completed, after which it completes. At the end of a process group NCCL's watchdog
// queries events without a pause, while nothing is launched any more.
constexpr int kMostQueries = 1000;

extern "C" {

// ---- devices

cudaError_t cudaGetDeviceCount(int* count) {
  *count = settings().gpus;
  return *count == 0 ? fail(cudaErrorNoDevice) : cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = gpu_of_thread;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= settings().gpus) return fail(cudaErrorInvalidDevice);
  gpu_of_thread = device;
  make_context(device);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  make_context(gpu_of_thread);
  wait_for_all();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = settings().capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = settings().capability % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = 108; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 * 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 163 * 1024; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 164 * 1024; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrL2CacheSize: *value = 40 * 1024 * 1024; break;
    case cudaDevAttrCooperativeLaunch: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= settings().gpus) return fail(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "Simulated GPU");
  properties->totalGlobalMem = settings().memory_bytes;
  auto read = [](cudaDeviceAttr attribute) {
    int value = 0;
    cudaDeviceGetAttribute(&value, attribute, 0);
    return value;
  };
  properties->major = read(cudaDevAttrComputeCapabilityMajor);
  properties->minor = read(cudaDevAttrComputeCapabilityMinor);
  properties->multiProcessorCount = read(cudaDevAttrMultiProcessorCount);
  properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxThreadsPerMultiProcessor = read(cudaDevAttrMaxThreadsPerMultiProcessor);
  properties->sharedMemPerBlock = read(cudaDevAttrMaxSharedMemoryPerBlock);
  properties->sharedMemPerBlockOptin = read(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  properties->sharedMemPerMultiprocessor = read(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->warpSize = 32;
  properties->maxGridSize[0] = 0x7fffffff;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->l2CacheSize = read(cudaDevAttrL2CacheSize);
  properties->memPitch = 0x7fffffff;
  properties->totalConstMem = 65536;
  properties->textureAlignment = 512;
  properties->concurrentKernels = properties->unifiedAddressing = 1;
  properties->asyncEngineCount = 3;
  properties->pciBusID = device + 1;
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

// ---- errors

cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError";
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    default: return "an error of the simulated GPU";
  }
}

// ---- memory

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  make_context(gpu_of_thread);
  bytes = rounded(bytes, 2 * kMiB);
  if (!take(gpu_of_thread, bytes)) return fail(cudaErrorMemoryAllocation);
  return add_block(pointer, bytes, gpu_of_thread);
}
cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) make_context(gpu_of_thread);
  wait_for_all();
  return remove_block(pointer);
}
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return remove_block(pointer); }
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return add_block(pointer, rounded(std::max<size_t>(bytes, 1), 4096), -1);
}
// Managed memory stays on the host: where its pages are is not counted.
cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned) { return cudaHostAlloc(pointer, bytes, 0); }
cudaError_t cudaMemPrefetchAsync(const void*, size_t, cudaMemLocation, unsigned, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaFreeHost(void* pointer) { return remove_block(pointer); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  make_context(gpu_of_thread);
  *free = free_bytes(gpu_of_thread);
  *total = settings().memory_bytes;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  std::lock_guard<std::mutex> guard(lock);
  const Block* block = block_of(pointer);
  *attributes = {};
  attributes->device = block == nullptr || block->gpu < 0 ? gpu_of_thread : block->gpu;
  if (block == nullptr) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -1;
    return cudaSuccess;
  }
  attributes->type = block->gpu < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->devicePointer = const_cast<void*>(pointer);
  attributes->hostPointer = block->gpu < 0 ? const_cast<void*>(pointer) : nullptr;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  launch();
  return copy(to, from, bytes);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  wait_for_all();
  return copy(to, from, bytes);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  launch();
  return copy(to, from, bytes);
}
cudaError_t cudaMemcpy2DAsync(
    void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind,
    cudaStream_t) {
  launch();
  for (size_t row = 0; is_made(width * height) && row < height; ++row) {
    std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  }
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  launch();
  if (is_made(bytes)) std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static void* block = nullptr;
  return block == nullptr && cudaMalloc(&block, kMiB) != cudaSuccess ? fail(cudaErrorMemoryAllocation)
                                                                    : (*pointer = block, cudaSuccess);
}

// ---- streams and events

static cudaError_t new_stream(cudaStream_t* stream) {
  *stream = reinterpret_cast<cudaStream_t>(new int(0));
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return new_stream(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return new_stream(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  new_stream(stream);
  *reinterpret_cast<int*>(*stream) = priority;
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream == nullptr ? 0 : *reinterpret_cast<int*>(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete reinterpret_cast<int*>(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) { return is_done(launched()) ? cudaSuccess : fail(cudaErrorNotReady); }
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  wait_for_all();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
#if CUDART_VERSION >= 13000
    const cudaGraphEdgeData**,
#endif
    size_t* count) {
  *status = cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = 0;
  if (count != nullptr) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  call(stream, cudaSuccess, data);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* data) {
  call(data);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  reinterpret_cast<Event*>(event)->time = launched();
  reinterpret_cast<Event*>(event)->queries = 0;
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  auto* one = reinterpret_cast<Event*>(event);
  return is_done(one->time) || ++one->queries > kMostQueries ? cudaSuccess : fail(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  wait_for_all();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = 0.01F * static_cast<float>(
      reinterpret_cast<Event*>(end)->time - reinterpret_cast<Event*>(start)->time);
  return cudaSuccess;
}

// ---- kernels

void** __cudaRegisterFatBinary(void*) { return new void*(nullptr); }
char __cudaInitModule(void**) { return 1; }
struct Call {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
static thread_local Call call_of_thread;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  call_of_thread = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = call_of_thread.grid;
  *block = call_of_thread.block;
  *shared = call_of_thread.shared;
  *static_cast<void**>(stream) = call_of_thread.stream;
  return cudaSuccess;
}
static cudaError_t launch_kernel() {
  make_context(gpu_of_thread);
  launch();
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return launch_kernel(); }
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return launch_kernel(); }
cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch_kernel();
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return launch_kernel(); }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 80;
  attributes->maxDynamicSharedSizeBytes = 163 * 1024;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads, size_t) {
  *blocks = std::max(1, 2048 / std::max(threads, 1));
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void* function, int threads, size_t shared, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

// ---- the driver's part: virtual memory, for the allocator's expandable segments

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the simulated GPU";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = settings().gpus;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device);
  if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) *value = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  make_context(device);
  *context = reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1);
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return cuDevicePrimaryCtxRetain(context, gpu_of_thread); }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuMemGetAllocationGranularity(
    size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = 2 * kMiB;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* memory = reserve(bytes, PROT_READ | PROT_WRITE);
  *pointer = reinterpret_cast<CUdeviceptr>(memory);
  if (memory == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard<std::mutex> guard(lock);
  blocks()[*pointer] = {bytes, gpu_of_thread};
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
  std::lock_guard<std::mutex> guard(lock);
  blocks().erase(pointer);
  munmap(reinterpret_cast<void*>(pointer), bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(
    CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties, unsigned long long) {
  int gpu = properties->location.id;
  make_context(gpu);
  if (!take(gpu, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Block{bytes, gpu});
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  auto* block = reinterpret_cast<Block*>(handle);
  give_back(block->gpu, block->bytes);
  delete block;
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
  madvise(reinterpret_cast<void*>(pointer), bytes, MADV_DONTNEED);
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
CUresult cuMemGetAddressRange(CUdeviceptr* start, size_t* bytes, CUdeviceptr pointer) {
  std::lock_guard<std::mutex> guard(lock);
  auto after = blocks().upper_bound(pointer);
  if (after == blocks().begin()) return CUDA_ERROR_INVALID_VALUE;
  *start = std::prev(after)->first;
  *bytes = std::prev(after)->second.bytes;
  return CUDA_SUCCESS;
}

// torch looks these up together with those above, but calls them only to share memory between processes or GPUs.
constexpr const char* kUnsupported[] = {
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuMemRetainAllocationHandle",
    "cuMemsetD32Async",
    "cuMulticastAddDevice",
    "cuMulticastBindMem",
    "cuMulticastCreate",
    "cuMulticastUnbind",
    "cuStreamWriteValue32"};
static CUresult unsupported() { return CUDA_ERROR_NOT_SUPPORTED; }

// Functions of this library are found by name; others are not there, as with an older driver.
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  static void* self = [] {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&cudaGetDriverEntryPointByVersion), &info);
    return dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
  }();
  *function = dlsym(self, name);
  if (*function == nullptr) *function = dlsym(self, (std::string(name) + "_v2").c_str());  // renamed in cuda.h
  for (const char* one : kUnsupported) {
    if (std::strcmp(one, name) == 0) *function = reinterpret_cast<void*>(unsupported);
  }
  if (result != nullptr) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// ---- NVML: it knows no process, and no connection between GPUs

int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void**) { return 0; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}
constexpr int kNotSupported = 3;
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return kNotSupported; }
int nvmlSystemGetCudaDriverVersion_v2(int*) { return kNotSupported; }

}  // extern "C"

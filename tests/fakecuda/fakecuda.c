/* A stand-in for libcuda.so.1 on a machine without a GPU: device memory is files of a tmpfs folder, mapped.
 *
 * What it stands in for: allocation, sharing (descriptors and cuIpc handles), mapping, copies, lifetimes across
 * processes, and errors. Kernels run only if somebody registers a `hook` that can (a PTX interpreter).
 * What it does not show: speed, real page faults of the GPU, streams that run by themselves.
 *
 * Lifetimes are the kernel's: each allocation is a file whose open description holds a lock, which travels with
 * descriptors and mappings and dies with the last of them. Memory is taken while that lock is.
 *
 * FAKECUDA_DIR          folder (tmpfs) that stands for the machine's GPUs; needed
 * FAKECUDA_DEVICES      number of GPUs (1); with FAKECUDA_MIG=1 the last one is a MIG instance
 * FAKECUDA_MEMORY       bytes of each (1 GiB)
 * FAKECUDA_UUIDS        their 32 hex digits, separated by commas; by default made up of the index
 * FAKECUDA_VERSION      of the driver (13000)
 * FAKECUDA_INIT         CUresult of cuInit (0)
 * FAKECUDA_NO_VMM       GPUs before Volta, without memory as descriptors: a mask, 1 is the first one
 * FAKECUDA_WSL=1        as on WSL2: neither descriptors nor cuIpc handles
 * FAKECUDA_RETURN_MS    memory of a process comes back so late after its end (0)
 * FAKECUDA_RDMA=0       a GPU without GPUDirect RDMA
 * FAKECUDA_HOOK         Python module to import before the first kernel is loaded: it calls fakecuda_set_hook
 * FAKECUDA_DIR/lost-N   while this file is there, GPU N has fallen off the bus
 * FAKECUDA_DIR/kill-PID a process kills itself over its next copy to the GPU or launch, and removes the file
 * CUDA_VISIBLE_DEVICES  as the driver reads it: indexes, UUIDs, abbreviated ones; the list ends at nonsense
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PAGE (2ull << 20)
#define ROUNDED(n) (((n) + PAGE - 1) / PAGE * PAGE)
#define MAX_DEVICES 16
#define MAX_CONTEXT_DEPTH 32
#define MAGIC "fakeipc1"
#define RETURNING 0400 /* mode of a file whose owner is gone, and which is counted for FAKECUDA_RETURN_MS */
#define NEED if (!initialised || owner_pid != getpid()) return CUDA_ERROR_NOT_INITIALIZED
#define NEED_CONTEXT NEED; if (!depth) return CUDA_ERROR_INVALID_CONTEXT
#define IN_LOCK(body) do { pthread_mutex_lock(&mutex); body; pthread_mutex_unlock(&mutex); } while (0)

enum kind { ALLOCATED = 1, OPENED, MAPPED, RESERVED };

struct physical { int fd, device, references, rdma; size_t bytes; };
struct region {
  struct region *next;
  uintptr_t at;
  size_t bytes;
  enum kind kind;
  int device, fd, writable;
  struct physical *physical;
};
struct context { int ordinal, retained; };
struct module { int id; };
struct function { int module; char name[256]; };
struct ipc_handle { char magic[8]; int32_t pid, fd, device; uint64_t bytes, inode; };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int initialised, visible_count, owner_pid, visible[MAX_DEVICES];
static struct context contexts[MAX_DEVICES];
static __thread struct context *stack[MAX_CONTEXT_DEPTH];
static __thread int depth;
static struct region *regions;

static long long setting(const char *name, long long otherwise) {
  const char *value = getenv(name);
  return value && *value ? strtoll(value, 0, 0) : otherwise;
}
static int device_count(void) { return (int)setting("FAKECUDA_DEVICES", 1); }
static size_t device_bytes(void) { return setting("FAKECUDA_MEMORY", 1ll << 30); }
static int is_mig(int device) { return setting("FAKECUDA_MIG", 0) && device == device_count() - 1; }
static int current_device(void) { return visible[stack[depth - 1]->ordinal]; }
static int known(int ordinal) { return ordinal >= 0 && ordinal < visible_count; }

/* ---- which GPUs there are */

static void hex_uuid(int device, char digits[33]) {
  const char *listed = getenv("FAKECUDA_UUIDS");
  for (int i = 0; listed && i < device; i++) listed = strchr(listed, ',') ? strchr(listed, ',') + 1 : 0;
  if (listed && strlen(listed) >= 32) snprintf(digits, 33, "%.32s", listed);
  else snprintf(digits, 33, "%02xfa4ec0da00000000000000000000%02x", 0xa0 + device, device);
}

static const char *folder(void) { const char *told = getenv("FAKECUDA_DIR"); return told ? told : "/nonexistent"; }

static int marked(const char *what, int number) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s-%d", folder(), what, number);
  return !access(path, F_OK);
}
static void die_if_wanted(void) {
  char path[4096];
  snprintf(path, sizeof path, "%s/kill-%d", folder(), getpid());
  if (!unlink(path)) kill(getpid(), SIGKILL);
}
static int without_vmm(int device) { return setting("FAKECUDA_NO_VMM", 0) >> device & 1; }
static void see(int device) { if (!marked("lost", device)) visible[visible_count++] = device; }

static int device_named(const char *entry) {
  char wanted[80], digits[33], *end;
  int length = 0, found = -1;
  long index = strtol(entry, &end, 10);
  if (end != entry && !*end) return index >= 0 && index < device_count() ? (int)index : -1;
  int mig = !strncasecmp(entry, "MIG-", 4);
  if (!mig && strncasecmp(entry, "GPU-", 4)) return -1;
  entry += 4 + (mig && !strncasecmp(entry + 4, "GPU-", 4) ? 4 : 0);
  for (; *entry && *entry != '/' && length < 79; entry++) if (*entry != '-') wanted[length++] = *entry;
  for (int device = 0; length && device < device_count(); device++) {
    hex_uuid(device, digits);
    if (is_mig(device) != mig || strncasecmp(digits, wanted, length)) continue;
    if (found >= 0) return -1; /* ambiguous */
    found = device;
  }
  return found;
}

static void find_visible(void) {
  const char *told = getenv("CUDA_VISIBLE_DEVICES");
  char copy[4096], *rest = copy, *entry;
  visible_count = 0;
  if (!told) { for (int device = 0; device < device_count(); device++) see(device); return; }
  snprintf(copy, sizeof copy, "%s", told);
  while ((entry = strsep(&rest, ","))) {
    while (*entry == ' ') entry++;
    int device = device_named(entry);
    if (device < 0) return;
    for (int i = 0; i < visible_count; i++) if (visible[i] == device) { visible_count = 0; return; } /* twice: none */
    see(device);
  }
}

CUresult cuInit(unsigned flags) {
  int told = (int)setting("FAKECUDA_INIT", 0);
  if (told) return told;
  if (initialised && owner_pid != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
  IN_LOCK(if (!initialised) {
    find_visible(); owner_pid = getpid(); initialised = 1;
    for (int i = 0; i < MAX_DEVICES; i++) contexts[i].ordinal = i;
  });
  return visible_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}
CUresult cuDriverGetVersion(int *version) { *version = (int)setting("FAKECUDA_VERSION", 13000); return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { NEED; *count = visible_count; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  NEED;
  if (!known(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char *name, int bytes, CUdevice device) {
  NEED;
  snprintf(name, bytes, is_mig(visible[device]) ? "NVIDIA Fake MIG 1g.5gb" : "NVIDIA Fake");
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  NEED;
  char digits[33];
  hex_uuid(visible[device], digits);
  for (int i = 0; i < 16; i++) sscanf(digits + 2 * i, "%2hhx", (unsigned char *)&uuid->bytes[i]);
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) { NEED; *bytes = device_bytes(); return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  NEED;
  int descriptors = !without_vmm(visible[device]) && !setting("FAKECUDA_WSL", 0);
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 4; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
  case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *value = 1; break;
  case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *value = !without_vmm(visible[device]); break;
  case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: *value = descriptors; break;
  case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: *value = (int)setting("FAKECUDA_RDMA", 1); break;
  default: *value = 0;
  }
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult code, const char **name) {
  static __thread char other[40];
  switch (code) {
  case CUDA_ERROR_INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
  case CUDA_ERROR_OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
  case CUDA_ERROR_NOT_INITIALIZED: *name = "CUDA_ERROR_NOT_INITIALIZED"; break;
  case CUDA_ERROR_NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
  case CUDA_ERROR_NOT_SUPPORTED: *name = "CUDA_ERROR_NOT_SUPPORTED"; break;
  default: snprintf(other, sizeof other, "CUresult %d", code); *name = other;
  }
  return CUDA_SUCCESS;
}

/* ---- contexts: a file each, so that tests see which process has one */

static int taken_file(const char *prefix, int device, size_t bytes);

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice ordinal) {
  NEED;
  if (!known(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  IN_LOCK(if (!contexts[ordinal].retained++) taken_file("context", visible[ordinal], 0)); /* kept until exit */
  *context = (CUcontext)&contexts[ordinal];
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  NEED;
  if (depth == MAX_CONTEXT_DEPTH) return CUDA_ERROR_OUT_OF_MEMORY;
  stack[depth++] = (struct context *)context;
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext *context) { NEED_CONTEXT; *context = (CUcontext)stack[--depth]; return CUDA_SUCCESS; }
CUresult cuCtxSynchronize(void) { NEED_CONTEXT; return CUDA_SUCCESS; }

/* ---- memory that is taken: files with a lock */

static int locked_folder(void) { /* one at a time counts and takes */
  int fd = open(folder(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd >= 0) flock(fd, LOCK_EX);
  return fd;
}

static int still_returning(int fd, const char *path, const struct stat *seen) {
  long long patience_ms = setting("FAKECUDA_RETURN_MS", 0);
  struct timespec now;
  if (!patience_ms) return 0;
  clock_gettime(CLOCK_REALTIME, &now);
  if ((seen->st_mode & 0777) != RETURNING) { futimens(fd, 0); fchmod(fd, RETURNING); return 1; }
  return (now.tv_sec - seen->st_mtim.tv_sec) * 1000 + (now.tv_nsec - seen->st_mtim.tv_nsec) / 1000000 < patience_ms;
}

static size_t taken_bytes(int device) {
  DIR *opened = opendir(folder());
  size_t sum = 0;
  char prefix[40], path[4096];
  snprintf(prefix, sizeof prefix, "memory-%d-", device);
  for (struct dirent *entry; opened && (entry = readdir(opened));) {
    if (strncmp(entry->d_name, prefix, strlen(prefix))) continue;
    snprintf(path, sizeof path, "%s/%s", folder(), entry->d_name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat seen;
    if (fd < 0 || fstat(fd, &seen)) continue;
    int dead = !flock(fd, LOCK_EX | LOCK_NB);
    if (dead && !still_returning(fd, path, &seen)) unlink(path); else sum += seen.st_size;
    close(fd);
  }
  if (opened) closedir(opened);
  return sum;
}

/* Of which process it is the name tells. The lock is shared, by everybody who has the description. */
static int taken_file(const char *prefix, int device, size_t bytes) {
  static int number;
  char path[4096];
  snprintf(path, sizeof path, "%s/%s-%d-%d-%d", folder(), prefix, device, getpid(), number++);
  int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return -1;
  if (flock(fd, LOCK_SH) || ftruncate(fd, bytes)) { close(fd); unlink(path); return -1; }
  return fd;
}

static CUresult take(int device, size_t bytes, int *fd) {
  int lock = locked_folder();
  if (lock < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  int room = taken_bytes(device) + bytes <= device_bytes();
  *fd = room ? taken_file("memory", device, bytes) : -1;
  close(lock);
  return !room ? CUDA_ERROR_OUT_OF_MEMORY : *fd < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  NEED_CONTEXT;
  int lock = locked_folder();
  size_t taken = taken_bytes(current_device());
  close(lock);
  *total = device_bytes();
  *free_bytes = taken < *total ? *total - taken : 0;
  return CUDA_SUCCESS;
}

/* ---- what is mapped where in this process */

static struct region *region_at(uintptr_t at, enum kind kind) {
  for (struct region *r = regions; r; r = r->next) if (r->at == at && r->kind == kind) return r;
  return 0;
}
static struct region *add_region(struct region like) {
  struct region *added = malloc(sizeof *added);
  *added = like;
  added->next = regions;
  return regions = added;
}
static void remove_region(struct region *gone) {
  for (struct region **link = &regions; *link; link = &(*link)->next)
    if (*link == gone) { *link = gone->next; free(gone); return; }
}
static CUresult accessible(CUdeviceptr at, size_t bytes, int writing) {
  CUresult code = CUDA_ERROR_INVALID_VALUE;
  IN_LOCK(for (struct region *r = regions; r; r = r->next)
    if (r->kind != RESERVED && at >= r->at && at + bytes <= r->at + r->bytes && (r->writable || !writing)) code = 0);
  return code;
}

/* ---- memory as descriptors */

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *wanted, CUmemAllocationGranularity_flags f) {
  NEED; *bytes = PAGE; return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *wanted, unsigned long long f) {
  NEED;
  if (!bytes || bytes % PAGE || wanted->type != CU_MEM_ALLOCATION_TYPE_PINNED || f) return CUDA_ERROR_INVALID_VALUE;
  if (wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE || !known(wanted->location.id)) return CUDA_ERROR_INVALID_DEVICE;
  if (without_vmm(visible[wanted->location.id]) || (setting("FAKECUDA_WSL", 0) && wanted->requestedHandleTypes)) return CUDA_ERROR_NOT_SUPPORTED;
  int device = visible[wanted->location.id], fd;
  CUresult code = take(device, bytes, &fd);
  if (code) return code;
  struct physical made = {fd, device, 1, wanted->allocFlags.gpuDirectRDMACapable, bytes};
  fchmod(fd, made.rdma ? 0640 : 0600); /* for tests: group-readable is RDMA-capable */
  struct physical *kept = malloc(sizeof made);
  *kept = made;
  *handle = (CUmemGenericAllocationHandle)kept;
  return CUDA_SUCCESS;
}
static void unreference(struct physical *physical) {
  if (--physical->references == 0) { close(physical->fd); free(physical); }
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { NEED; IN_LOCK(unreference((struct physical *)handle)); return CUDA_SUCCESS; }
CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long f) {
  NEED;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  int fd = fcntl(((struct physical *)handle)->fd, F_DUPFD_CLOEXEC, 3);
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *(int *)out = fd;
  return CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle, CUmemAllocationHandleType type) {
  NEED;
  char link[64], target[4096] = "";
  struct stat seen;
  int device, fd = (int)(intptr_t)os_handle;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, target, sizeof target - 1);
  const char *name = strrchr(target, '/');
  if (length <= 0 || !name || sscanf(name, "/memory-%d-", &device) != 1 || fstat(fd, &seen)) return CUDA_ERROR_INVALID_VALUE;
  struct physical *kept = malloc(sizeof *kept);
  *kept = (struct physical){fcntl(fd, F_DUPFD_CLOEXEC, 3), device, 1, seen.st_mode == (S_IFREG | 0640), seen.st_size};
  *handle = (CUmemGenericAllocationHandle)kept;
  return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *found, CUmemGenericAllocationHandle handle) {
  NEED;
  struct physical *physical = (struct physical *)handle;
  memset(found, 0, sizeof *found);
  found->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  found->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  found->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  found->location.id = -1;
  for (int i = 0; i < visible_count; i++) if (visible[i] == physical->device) found->location.id = i;
  found->allocFlags.gpuDirectRDMACapable = physical->rdma;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long f) {
  NEED;
  if (!bytes || bytes % PAGE) return CUDA_ERROR_INVALID_VALUE;
  char *wide = mmap(0, bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (wide == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  char *begin = (char *)ROUNDED((uintptr_t)wide);
  if (begin > wide) munmap(wide, begin - wide);
  if (wide + PAGE > begin) munmap(begin + bytes, wide + PAGE - begin);
  IN_LOCK(add_region((struct region){.at = (uintptr_t)begin, .bytes = bytes, .kind = RESERVED}));
  *at = (CUdeviceptr)begin;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
  NEED;
  CUresult code = CUDA_ERROR_INVALID_VALUE;
  IN_LOCK(struct region *found = region_at(at, RESERVED);
    if (found && found->bytes == bytes && !region_at(at, MAPPED)) { munmap((void *)at, bytes); remove_region(found); code = 0; });
  return code;
}
CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long f) {
  NEED;
  struct physical *physical = (struct physical *)handle;
  if (offset || f || bytes % PAGE || bytes > physical->bytes) return CUDA_ERROR_INVALID_VALUE;
  if (mmap((void *)at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->fd, 0) == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
  madvise((void *)at, bytes, MADV_DONTFORK); /* a forked child has no GPU memory */
  IN_LOCK(physical->references++;
    add_region((struct region){.at = at, .bytes = bytes, .kind = MAPPED, .device = physical->device, .physical = physical}));
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *wanted, size_t count) {
  NEED;
  struct region *found = region_at(at, MAPPED);
  if (!found || count != 1 || wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE || !known(wanted->location.id)) return CUDA_ERROR_INVALID_VALUE;
  if (visible[wanted->location.id] != found->device) return CUDA_ERROR_INVALID_DEVICE; /* no peer access here */
  found->writable = wanted->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return mprotect((void *)at, bytes, PROT_READ | (found->writable ? PROT_WRITE : 0)) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  NEED;
  CUresult code = CUDA_ERROR_INVALID_VALUE;
  IN_LOCK(struct region *found = region_at(at, MAPPED);
    if (found && found->bytes == bytes) {
      mmap((void *)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
      unreference(found->physical); remove_region(found); code = 0;
    });
  return code;
}

/* ---- memory of one process, and cuIpc handles: opened through /proc, so they die with their maker */

CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t bytes) {
  NEED_CONTEXT;
  int fd;
  CUresult code = bytes ? take(current_device(), ROUNDED(bytes), &fd) : CUDA_ERROR_INVALID_VALUE;
  if (code) return code;
  void *mapped = mmap(0, ROUNDED(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  IN_LOCK(add_region((struct region){
    .at = (uintptr_t)mapped, .bytes = ROUNDED(bytes), .kind = ALLOCATED, .device = current_device(), .fd = fd, .writable = 1}));
  *at = (CUdeviceptr)mapped;
  return CUDA_SUCCESS;
}
CUresult cuMemFree_v2(CUdeviceptr at) {
  NEED_CONTEXT;
  CUresult code = CUDA_ERROR_INVALID_VALUE;
  IN_LOCK(struct region *found = region_at(at, ALLOCATED);
    if (found) { munmap((void *)at, found->bytes); close(found->fd); remove_region(found); code = 0; });
  return code;
}
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr at) {
  NEED_CONTEXT;
  if (setting("FAKECUDA_WSL", 0)) return CUDA_ERROR_NOT_SUPPORTED;
  struct region *found = region_at(at, ALLOCATED);
  struct stat seen;
  if (!found || fstat(found->fd, &seen)) return CUDA_ERROR_INVALID_VALUE;
  struct ipc_handle made = {MAGIC, getpid(), found->fd, found->device, found->bytes, seen.st_ino};
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &made, sizeof made);
  return CUDA_SUCCESS;
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *at, CUipcMemHandle handle, unsigned flags) {
  NEED_CONTEXT;
  struct ipc_handle told;
  struct stat seen;
  char path[64];
  memcpy(&told, &handle, sizeof told);
  if (memcmp(told.magic, MAGIC, 8) || told.device != current_device()) return CUDA_ERROR_INVALID_VALUE;
  if (told.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", told.pid, told.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return CUDA_ERROR_MAP_FAILED;
  void *mapped = fstat(fd, &seen) || seen.st_ino != told.inode ? MAP_FAILED
    : mmap(0, told.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (mapped == MAP_FAILED) return CUDA_ERROR_MAP_FAILED;
  IN_LOCK(add_region((struct region){.at = (uintptr_t)mapped, .bytes = told.bytes, .kind = OPENED, .device = told.device, .writable = 1}));
  *at = (CUdeviceptr)mapped;
  return CUDA_SUCCESS;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr at) {
  NEED_CONTEXT;
  CUresult code = CUDA_ERROR_INVALID_VALUE;
  IN_LOCK(struct region *found = region_at(at, OPENED);
    if (found) { munmap((void *)at, found->bytes); remove_region(found); code = 0; });
  return code;
}

/* ---- copies: refused, not crashing, outside of device memory */

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
  NEED_CONTEXT;
  CUresult code = accessible(to, bytes, 1);
  die_if_wanted();
  if (!code) memcpy((void *)to, from, bytes);
  return code;
}
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
  NEED_CONTEXT;
  CUresult code = accessible(from, bytes, 0);
  if (!code) memcpy(to, (void *)from, bytes);
  return code;
}
CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes) {
  NEED_CONTEXT;
  CUresult code = accessible(to, bytes, 1);
  if (!code) memset((void *)to, value, bytes);
  return code;
}

/* ---- streams and events: everything is done at once */

struct moment { struct timespec at; };

CUresult cuStreamCreate(CUstream *stream, unsigned flags) { NEED_CONTEXT; *stream = (CUstream)calloc(1, 8); return CUDA_SUCCESS; }
CUresult cuStreamDestroy_v2(CUstream stream) { NEED_CONTEXT; free((void *)stream); return CUDA_SUCCESS; }
CUresult cuStreamSynchronize(CUstream stream) {
  NEED_CONTEXT;
  const char *marker = getenv("FAKECUDA_DIR");
  char path[4096];
  snprintf(path, sizeof path, "%s/synchronized-%d", marker ? marker : "", getpid()); /* for tests to see */
  close(open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  return CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent *event, unsigned flags) { NEED_CONTEXT; *event = (CUevent)calloc(1, sizeof(struct moment)); return CUDA_SUCCESS; }
CUresult cuEventDestroy_v2(CUevent event) { NEED_CONTEXT; free((void *)event); return CUDA_SUCCESS; }
CUresult cuEventRecord(CUevent event, CUstream stream) {
  NEED_CONTEXT;
  clock_gettime(CLOCK_MONOTONIC, &((struct moment *)event)->at);
  return CUDA_SUCCESS;
}
CUresult cuEventSynchronize(CUevent event) { NEED_CONTEXT; return CUDA_SUCCESS; }
CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to) {
  NEED;
  struct timespec a = ((struct moment *)from)->at, b = ((struct moment *)to)->at;
  *ms = (b.tv_sec - a.tv_sec) * 1e3f + (b.tv_nsec - a.tv_nsec) / 1e6f;
  return CUDA_SUCCESS;
}

/* ---- kernels: run by whoever registered */

struct hook {
  int (*load)(const void *image);                                /* a module's number from 1 on, or 0 */
  int (*has)(int module, const char *name);                      /* whether it has that function */
  int (*launch)(int module, const char *name, const unsigned shape[7], void **parameters); /* a CUresult */
};
static struct hook hook;

void fakecuda_set_hook(struct hook given) { hook = given; }

int fakecuda_region(int index, uint64_t *at, uint64_t *bytes) { /* device memory that this process can reach */
  for (struct region *r = regions; r; r = r->next) {
    if (r->kind == RESERVED || index--) continue;
    *at = r->at;
    *bytes = r->bytes;
    return 1;
  }
  return 0;
}

static void find_hook(void) {
  const char *module = getenv("FAKECUDA_HOOK");
  int (*ensure)(void) = dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
  void (*release)(int) = dlsym(RTLD_DEFAULT, "PyGILState_Release");
  int (*run)(const char *) = dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
  char line[300];
  if (hook.load || !module || !ensure || !release || !run) return;
  snprintf(line, sizeof line, "import %s", module);
  int state = ensure();
  run(line);
  release(state);
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  NEED_CONTEXT;
  find_hook();
  int id = hook.load ? hook.load(image) : 0;
  if (!id) return CUDA_ERROR_INVALID_IMAGE;
  struct module *made = malloc(sizeof *made);
  made->id = id;
  *module = (CUmodule)made;
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { NEED_CONTEXT; free((void *)module); return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  NEED_CONTEXT;
  int id = ((struct module *)module)->id;
  if (!hook.has(id, name)) return CUDA_ERROR_NOT_FOUND;
  struct function *made = malloc(sizeof *made);
  made->module = id;
  snprintf(made->name, sizeof made->name, "%s", name);
  *function = (CUfunction)made;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { NEED_CONTEXT; return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **parameters, void **extra) {
  NEED_CONTEXT;
  struct function *called = (struct function *)function;
  die_if_wanted();
  unsigned shape[7] = {gx, gy, gz, bx, by, bz, shared};
  if (bx * by * bz > 1024 || !gx || !gy || !gz || extra) return CUDA_ERROR_INVALID_VALUE;
  return hook.launch(called->module, called->name, shape, parameters);
}

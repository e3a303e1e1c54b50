/* A stand-in for libcuda.so.1 on a machine without a GPU: device memory is files of a tmpfs folder, mapped.
 * One translation unit: devices.c, memory.c and work.c are included below.
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
 * FAKECUDA_NO_CONTEXT=1 a GPU that others have for themselves alone (compute mode)
 * FAKECUDA_HOOK         Python module to import before the first kernel is loaded: it calls fakecuda_set_hook
 * FAKECUDA_DIR/lost-N   while this file is there, GPU N has fallen off the bus
 * FAKECUDA_DIR/die-PID  the hook kills the process in the kernel whose name begins with its content
 * FAKECUDA_DIR/die-copying-PID  the process is killed in the middle of so many a copy from now on
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
#define DIRTY (4ull << 20) /* bytes at the begin of new memory that are not zero */
#define RETURNING 0400 /* mode of a file whose owner is gone, and which is counted for FAKECUDA_RETURN_MS */
#define NEED if (!initialised || owner_pid != getpid()) return CUDA_ERROR_NOT_INITIALIZED
#define NEED_CONTEXT NEED; if (!depth) return CUDA_ERROR_INVALID_CONTEXT
#define IN_LOCK(body) do { pthread_mutex_lock(&mutex); body; pthread_mutex_unlock(&mutex); } while (0)

enum kind { ALLOCATED = 1, OPENED, MAPPED, RESERVED, REGISTERED };

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

#include "devices.c"
#include "memory.c"
#include "work.c"

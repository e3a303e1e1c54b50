/* Memory: taken, shared, mapped. Part of fakecuda.c. */

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

/* As on a GPU: whatever the last process left there. Not all of it, to spare the tmpfs. */
static void dirty(int fd, size_t bytes) {
  static const char secret[] = "another process's bytes ";
  char page[4096];
  for (size_t i = 0; i < sizeof page; i++) page[i] = secret[i % (sizeof secret - 1)];
  for (size_t at = 0; at < bytes && at < DIRTY; at += sizeof page) if (pwrite(fd, page, sizeof page, at) < 0) return;
}

static CUresult take(int device, size_t bytes, int *fd) {
  int lock = locked_folder();
  if (lock < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  int room = taken_bytes(device) + bytes <= device_bytes();
  *fd = room ? taken_file("memory", device, bytes) : -1;
  close(lock);
  if (*fd >= 0) dirty(*fd, bytes);
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

/* ---- host memory that kernels reach: by its own address, as on x86 Linux */

CUresult cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags) {
  NEED_CONTEXT;
  if (!at || !bytes || flags != CU_MEMHOSTREGISTER_DEVICEMAP) return CUDA_ERROR_INVALID_VALUE;
  if (region_at((uintptr_t)at, REGISTERED)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  IN_LOCK(add_region((struct region){.at = (uintptr_t)at, .bytes = bytes, .kind = REGISTERED, .device = current_device(), .writable = 1}));
  return CUDA_SUCCESS;
}
CUresult cuMemHostUnregister(void *at) {
  NEED_CONTEXT;
  CUresult code = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  IN_LOCK(struct region *found = region_at((uintptr_t)at, REGISTERED); if (found) { remove_region(found); code = 0; });
  return code;
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *at, unsigned flags) {
  NEED_CONTEXT;
  *device = (CUdeviceptr)at;
  return region_at((uintptr_t)at, REGISTERED) && !flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

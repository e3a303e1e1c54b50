/* Which GPUs a process sees, what they can, and its contexts. Part of fakecuda.c. */

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
  if (setting("FAKECUDA_NO_CONTEXT", 0)) return CUDA_ERROR_DEVICE_UNAVAILABLE;
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

/* Copies, streams, events and launches. Part of fakecuda.c. */

/* ---- copies: refused, not crashing, outside of device memory */

static void copy(void *to, const void *from, size_t bytes) {
  static char path[4096]; /* of what a test wishes: see fakecuda.c */
  if (!*path) snprintf(path, sizeof path, "%s/die-copying-%d", getenv("FAKECUDA_DIR"), getpid());
  FILE *wish = fopen(path, "r+");
  int left = 0;
  if (wish) {
    if (fscanf(wish, "%d", &left) != 1) left = 0;
    rewind(wish);
    fprintf(wish, "%d ", left - 1);
    fclose(wish);
  }
  if (wish && left <= 1) {
    memcpy(to, from, bytes / 2);
    kill(getpid(), SIGKILL);
  }
  memcpy(to, from, bytes);
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
  NEED_CONTEXT;
  CUresult code = accessible(to, bytes, 1);
  if (!code) copy((void *)to, from, bytes);
  return code;
}
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
  NEED_CONTEXT;
  CUresult code = accessible(from, bytes, 0);
  if (!code) copy(to, (void *)from, bytes);
  return code;
}
CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  NEED_CONTEXT;
  CUresult code = accessible(to, bytes, 1) || accessible(from, bytes, 0);
  if (!code) copy((void *)to, (void *)from, bytes);
  return code;
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream s) { return cuMemcpyHtoD_v2(to, from, bytes); }
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream s) { return cuMemcpyDtoH_v2(to, from, bytes); }
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream s) { return cuMemcpyDtoD_v2(to, from, bytes); }

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
  snprintf(path, sizeof path, "%s/synchronized-%d-%zu", marker ? marker : "", getpid(), (size_t)stream); /* for tests to see */
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
  unsigned shape[7] = {gx, gy, gz, bx, by, bz, shared};
  if (bx * by * bz > 1024 || !gx || !gy || !gz || extra) return CUDA_ERROR_INVALID_VALUE;
  return hook.launch(called->module, called->name, shape, parameters);
}

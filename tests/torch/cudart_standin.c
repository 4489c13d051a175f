/* A stand-in for the part of the CUDA runtime (cudart) that PyTorch needs to see a GPU.
 *
 * It is preloaded before an unmodified CUDA build of torch (12 or 13) and answers in place of the real
 * libcudart: devices, contexts, memory, streams, events and captures. Everything else, such as
 * registering kernels, goes to the real library. Nothing is computed: device addresses and stream
 * handles are numbers that are never dereferenced, kernels and copies succeed without doing anything,
 * and copies from the device to the host read as zeros.
 *
 * If a libcuda.so.1 can be loaded (Cushion's stand-in for the driver), calls go to it, as with the real
 * runtime, so that a plug-in that calls the driver and torch, which calls the runtime, see one device.
 * That stand-in learns captures, and which stream waits for which, only from its test hooks (standin_*),
 * so this file calls them. Without a driver, or if it lacks a function, this file answers by itself:
 * STANDIN_DEVICES devices (1) of STANDIN_CAPACITY bytes (16 GiB).
 *
 * STANDIN_LOG=1 writes calls to stderr. tests/torch/standin.sh builds and runs it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef unsigned long long u64;
typedef int status; /* cudaError_t or CUresult: the numbers used here are the same in both */
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101,
       NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901 };
enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1 };

#ifdef NO_DRIVER
/* With this macro, the file is an empty libcuda.so.1 (without cuInit) for a machine that has none:
 * torch's libcaffe2_nvrtc.so does not load without one, and torch then does not initialise. */

status cuCtxGetCurrent(void **context) {
    *context = NULL;
    return OK;
}
status cuCtxSetCurrent(void *context) {
    return OK;
}
status cuDeviceGet(int *out, int ordinal) {
    *out = ordinal;
    return OK;
}
status cuDeviceGetAttribute(int *out, int which, int ordinal) {
    *out = 0;
    return OK;
}
status cuDevicePrimaryCtxGetState(int ordinal, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return OK;
}
status cuDevicePrimaryCtxRetain(void **context, int ordinal) {
    *context = NULL;
    return OK;
}
#else

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int device;
static __thread status last_error;

static void trace(const char *format, ...) {
    static int on = -1;
    if (on < 0) on = getenv("STANDIN_LOG") != NULL;
    if (!on) return;
    va_list list;
    va_start(list, format);
    fprintf(stderr, "cudart: ");
    vfprintf(stderr, format, list);
    fputc('\n', stderr);
    va_end(list);
}

static status done(status answer) {
    if (answer != OK) last_error = answer;
    return answer;
}

/* The driver, if there is one. */

static status no_driver; /* the error of a driver that does not start */

static void *driver(const char *name) {
    static void *library;
    static int tried; /* only once: a library that appears later would have its own devices and memory */
    pthread_mutex_lock(&lock);
    if (!tried) {
        tried = 1;
        library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        status (*init)(unsigned) = library ? (status(*)(unsigned))dlsym(library, "cuInit") : NULL;
        if (init) no_driver = init(0);
        trace("libcuda.so.1 %s, cuInit %d", init ? "found" : "not found", no_driver);
        if (!init || no_driver != OK) library = NULL;
    }
    pthread_mutex_unlock(&lock);
    return library ? dlsym(library, name) : NULL;
}

/* ASK(name, (types), (arguments)): calls the driver and returns its result, if it has the function. */
#define ASK(name, types, arguments)                                              \
    do {                                                                         \
        static status(*function) types;                                          \
        static int looked;                                                       \
        if (!looked) {                                                           \
            function = (status(*) types)driver(name);                            \
            looked = 1;                                                          \
        }                                                                        \
        if (function) return done(function arguments);                           \
    } while (0)

/* TELL(name, (types), (arguments)): calls a test hook, which returns nothing; 1 if it exists. */
#define TELL(name, types, arguments)                                             \
    ({                                                                           \
        static void(*function) types;                                            \
        static int looked;                                                       \
        if (!looked) {                                                           \
            function = (void(*) types)driver(name);                              \
            looked = 1;                                                          \
        }                                                                        \
        if (function) function arguments;                                        \
        function != NULL;                                                        \
    })

static u64 setting(const char *name, u64 otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

/* The runtime works in the primary context of the thread's device; so does a plug-in called from it.
 * The context is set once per thread and device, not at every call, so that the driver's counts are
 * mostly those of the plug-in. */
static status make_current(int ordinal) {
    static status (*get_device)(int *, int), (*retain)(void **, int), (*set_current)(void *);
    static void *contexts[64];
    static int looked;
    static __thread int ready = -1;
    if (ready == ordinal) return OK;
    if (!looked) {
        get_device = (status(*)(int *, int))driver("cuDeviceGet");
        retain = (status(*)(void **, int))driver("cuDevicePrimaryCtxRetain");
        set_current = (status(*)(void *))driver("cuCtxSetCurrent");
        looked = 1;
    }
    if (!get_device || !retain || !set_current) return OK;
    if (ordinal < 0 || ordinal >= 64) return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    int handle = ordinal;
    status answer = contexts[ordinal] ? OK : get_device(&handle, ordinal);
    if (answer == OK && !contexts[ordinal]) answer = retain(&contexts[ordinal], handle);
    if (answer == OK) answer = set_current(contexts[ordinal]);
    pthread_mutex_unlock(&lock);
    if (answer == OK) ready = ordinal;
    return answer;
}

#define IN_CONTEXT()                                  \
    do {                                              \
        status answer_ = make_current(device);        \
        if (answer_ != OK) return done(answer_);      \
    } while (0)

/* Devices. */

status cudaGetDeviceCount(int *count) {
    ASK("cuDeviceGetCount", (int *), (count));
    *count = 0;
    if (no_driver != OK) return done(no_driver);
    *count = (int)setting("STANDIN_DEVICES", 1);
    return OK;
}

status cudaGetDevice(int *out) {
    *out = device;
    return OK;
}

status cudaSetDevice(int ordinal) {
    int count = 0;
    status answer = cudaGetDeviceCount(&count);
    if (answer != OK) return answer;
    if (ordinal < 0 || ordinal >= count) return done(INVALID_DEVICE);
    device = ordinal;
    return done(make_current(ordinal));
}

status cudaInitDevice(int ordinal, unsigned device_flags, unsigned flags) {
    return done(make_current(ordinal));
}

status cudaGetLastError(void) {
    status answer = last_error;
    last_error = OK;
    return answer;
}

status cudaPeekAtLastError(void) { return last_error; }

status cudaDriverGetVersion(int *version) {
    ASK("cuDriverGetVersion", (int *), (version));
    *version = 13020;
    return OK;
}

status cudaDeviceSynchronize(void) {
    trace("cudaDeviceSynchronize");
    IN_CONTEXT();
    ASK("cuCtxSynchronize", (void), ());
    return OK;
}

status cudaMemGetInfo(size_t *, size_t *);

static u64 total_bytes(int ordinal) {
    static status (*total)(size_t *, int);
    static int looked;
    size_t bytes = 0;
    if (!looked) total = (status(*)(size_t *, int))driver("cuDeviceTotalMem_v2"), looked = 1;
    if (total && total(&bytes, ordinal) == OK) return bytes;
    return setting("STANDIN_CAPACITY", 16ull << 30);
}

/* The few attributes torch reads, with the values of an H100; the numbers are of CUdevice_attribute. */
static int attribute(int which) {
    switch (which) {
    case 1: case 2: case 3: case 39: return which == 39 ? 2048 : 1024; /* threads */
    case 4: return 64;
    case 5: return 2147483647;
    case 6: case 7: return 65535;
    case 8: return 49152;       /* shared memory per block */
    case 9: return 65536;       /* constant memory */
    case 10: return 32;         /* warp */
    case 12: case 82: return 65536; /* registers */
    case 16: return 132;        /* multiprocessors */
    case 31: case 41: case 83: case 95: return 1;
    case 38: return 50 << 20;   /* L2 */
    case 75: return 9;          /* compute capability */
    case 76: return 0;
    case 81: return 233472;     /* shared memory per multiprocessor */
    case 97: return 232448;     /* shared memory per block, opt-in */
    case 102: return 1;         /* virtual memory management */
    case 106: return 32;        /* blocks per multiprocessor */
    default: return 0;
    }
}

status cudaDeviceGetAttribute(int *value, int which, int ordinal) {
    static status (*ask)(int *, int, int);
    static int looked;
    if (!looked) ask = (status(*)(int *, int, int))driver("cuDeviceGetAttribute"), looked = 1;
    *value = 0;
    if (!ask || ask(value, which, ordinal) != OK) *value = attribute(which);
    return OK;
}

/* cudaDeviceProp by offsets: CUDA 13 dropped members in the middle. */
static status properties(char *out, int ordinal, int thirteen) {
    int count = 0;
    status answer = cudaGetDeviceCount(&count);
    if (answer != OK) return answer;
    if (ordinal < 0 || ordinal >= count) return done(INVALID_DEVICE);
    memset(out, 0, thirteen ? 1008 : 1032);
    snprintf(out, 256, "Stand-in GPU");
    memset(out + 256, 0xA0 + ordinal, 16); /* uuid */
#define PUT(type, at12, at13, value) (*(type *)(out + (thirteen ? (at13) : (at12))) = (type)(value))
    PUT(size_t, 288, 288, total_bytes(ordinal));
    PUT(size_t, 296, 296, attribute(8));
    PUT(int, 304, 304, attribute(12));
    PUT(int, 308, 308, attribute(10));
    PUT(size_t, 312, 312, 2147483647);
    PUT(int, 320, 320, attribute(1));
    for (int i = 0; i < 3; i++) {
        PUT(int, 324 + 4 * i, 324 + 4 * i, attribute(2 + i));
        PUT(int, 336 + 4 * i, 336 + 4 * i, attribute(5 + i));
    }
    PUT(size_t, 352, 352, attribute(9));
    int major, minor;
    cudaDeviceGetAttribute(&major, 75, ordinal);
    cudaDeviceGetAttribute(&minor, 76, ordinal);
    PUT(int, 360, 360, major);
    PUT(int, 364, 364, minor);
    PUT(size_t, 368, 368, 512);
    PUT(int, 388, 384, attribute(16));
    PUT(int, 400, 392, 1); /* canMapHostMemory */
    PUT(int, 576, 560, 1); /* concurrentKernels */
    PUT(int, 584, 568, 1 + ordinal); /* pciBusID */
    PUT(int, 600, 584, 1);
    PUT(int, 604, 588, 1); /* unifiedAddressing */
    PUT(int, 612, 592, 5120);
    PUT(int, 616, 596, attribute(38));
    PUT(int, 624, 604, attribute(39));
    PUT(size_t, 640, 624, attribute(81));
    PUT(int, 648, 632, attribute(82));
    PUT(int, 652, 636, 1);
    PUT(int, 688, 668, 1);
    PUT(size_t, 696, 672, attribute(97));
    PUT(int, 712, 688, attribute(106));
#undef PUT
    return OK;
}

status cudaGetDeviceProperties(void *out, int ordinal) { return properties(out, ordinal, 1); }
status cudaGetDeviceProperties_v2(void *out, int ordinal) { return properties(out, ordinal, 0); }

status cudaDeviceGetPCIBusId(char *out, int length, int ordinal) {
    snprintf(out, (size_t)length, "0000:%02X:00.0", 1 + ordinal);
    return OK;
}

status cudaDeviceCanAccessPeer(int *can, int from, int to) {
    ASK("cuDeviceCanAccessPeer", (int *, int, int), (can, from, to));
    *can = from != to;
    return OK;
}

static status not_supported(void) { return NOT_SUPPORTED; }

status cuGetErrorString(status code, const char **out) {
    ASK("cuGetErrorName", (status, const char **), (code, out));
    *out = "there is no driver";
    return OK;
}

/* torch stops if a driver function that it lists as required is missing; a function that it never
 * calls may fail when called. */
status cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, u64 flags, int *result) {
    static const char *const suffixes[] = {"_v2", ""};
    char symbol[128];
    IN_CONTEXT(); /* the caller calls the driver next */
    *out = NULL;
    for (int i = 0; i < 2 && !*out; i++) {
        snprintf(symbol, sizeof symbol, "%s%s", name, suffixes[i]);
        *out = driver(symbol);
    }
    if (!*out && !strcmp(name, "cuGetErrorString")) *out = (void *)cuGetErrorString;
    if (!*out && (!strncmp(name, "cuMem", 5) || !strncmp(name, "cuDeviceGet", 11) || !strncmp(name, "cuStream", 8)))
        *out = (void *)not_supported;
    if (result) *result = *out ? 0 : 1;
    trace("driver entry point %s: %s", name, *out == (void *)not_supported ? "refuses" : *out ? "found" : "none");
    return OK;
}

status cudaGetDriverEntryPoint(const char *name, void **out, u64 flags, int *result) {
    return cudaGetDriverEntryPointByVersion(name, out, 12000, flags, result);
}

/* Memory. Only its size is tracked. */

struct range { uintptr_t from; size_t bytes; int device; struct range *next; };
static struct range *device_ranges, *host_ranges;
static u64 used[64];

static void put(struct range **list, uintptr_t from, size_t bytes) {
    struct range *range = malloc(sizeof *range);
    *range = (struct range){from, bytes, device, *list};
    *list = range;
}

static int take(struct range **list, uintptr_t from, struct range *out) {
    for (; *list; list = &(*list)->next)
        if ((*list)->from == from) {
            struct range *found = *list;
            *out = *found;
            *list = found->next;
            free(found);
            return 1;
        }
    return 0;
}

status cudaMalloc(void **out, size_t bytes) {
    trace("cudaMalloc %zu", bytes);
    IN_CONTEXT();
    ASK("cuMemAlloc_v2", (void **, size_t), (out, bytes));
    static uintptr_t next = 0x700000000000;
    status answer = OK;
    pthread_mutex_lock(&lock);
    if (used[device & 63] + bytes > setting("STANDIN_CAPACITY", 16ull << 30)) {
        answer = OUT_OF_MEMORY;
    } else {
        *out = (void *)next;
        next += (bytes + (2 << 20)) & ~(uintptr_t)((2 << 20) - 1);
        used[device & 63] += bytes;
        put(&device_ranges, (uintptr_t)*out, bytes);
    }
    pthread_mutex_unlock(&lock);
    return done(answer);
}

status cudaFree(void *address) {
    trace("cudaFree %p", address);
    IN_CONTEXT();
    if (!address) return OK;
    ASK("cuMemFree_v2", (void *), (address));
    struct range range;
    pthread_mutex_lock(&lock);
    int found = take(&device_ranges, (uintptr_t)address, &range);
    if (found) used[range.device & 63] -= range.bytes;
    pthread_mutex_unlock(&lock);
    return done(found ? OK : INVALID_VALUE);
}

status cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    IN_CONTEXT();
    ASK("cuMemGetInfo_v2", (size_t *, size_t *), (free_bytes, total));
    *total = setting("STANDIN_CAPACITY", 16ull << 30);
    *free_bytes = *total - used[device & 63];
    return OK;
}

status cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    *out = NULL;
    if (posix_memalign(out, 4096, bytes ? bytes : 1)) return done(OUT_OF_MEMORY);
    pthread_mutex_lock(&lock);
    put(&host_ranges, (uintptr_t)*out, bytes);
    pthread_mutex_unlock(&lock);
    return OK;
}

status cudaMallocHost(void **out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }

status cudaFreeHost(void *address) {
    struct range range;
    pthread_mutex_lock(&lock);
    int found = take(&host_ranges, (uintptr_t)address, &range);
    pthread_mutex_unlock(&lock);
    if (!found) return done(INVALID_VALUE);
    free(address);
    return OK;
}

status cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    pthread_mutex_lock(&lock);
    put(&host_ranges, (uintptr_t)address, bytes);
    pthread_mutex_unlock(&lock);
    return OK;
}

status cudaHostUnregister(void *address) {
    struct range range;
    pthread_mutex_lock(&lock);
    int found = take(&host_ranges, (uintptr_t)address, &range);
    pthread_mutex_unlock(&lock);
    return done(found ? OK : INVALID_VALUE);
}

status cudaHostGetDevicePointer(void **out, void *host, unsigned flags) {
    *out = host;
    return OK;
}

struct pointer_attributes { int type, device; void *device_pointer, *host_pointer; };

/* 0: host, 1: pinned host, 2: device, which is any address for which the process has no page. */
status cudaPointerGetAttributes(struct pointer_attributes *out, const void *address) {
    unsigned char resident;
    *out = (struct pointer_attributes){0, device, NULL, NULL};
    pthread_mutex_lock(&lock);
    for (struct range *range = host_ranges; range; range = range->next)
        if ((uintptr_t)address - range->from < range->bytes) out->type = 1;
    pthread_mutex_unlock(&lock);
    if (!out->type && mincore((void *)((uintptr_t)address & ~(uintptr_t)4095), 1, &resident) != 0) out->type = 2;
    if (out->type != 2) out->host_pointer = (void *)address;
    if (out->type != 0) out->device_pointer = (void *)address;
    return OK;
}

static status copy(void *to, size_t bytes, int kind) {
    if (kind == 2) memset(to, 0, bytes); /* device to host: reads as zeros */
    return OK;
}

status cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
    return copy(to, bytes, kind);
}
status cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    return copy(to, bytes, kind);
}
status cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         int kind, void *stream) {
    for (size_t row = 0; row < height; row++) copy((char *)to + row * to_pitch, width, kind);
    return OK;
}

/* An IPC handle is the address or the event itself: enough within one process. */

struct ipc { char bytes[64]; };

static status ipc_handle(struct ipc *out, void *what) {
    memset(out, 0, sizeof *out);
    memcpy(out->bytes, &what, sizeof what);
    return OK;
}
static status ipc_open(void **out, struct ipc handle) {
    memcpy(out, handle.bytes, sizeof *out);
    return OK;
}

status cudaIpcGetMemHandle(struct ipc *out, void *address) {
    IN_CONTEXT();
    ASK("cuIpcGetMemHandle", (struct ipc *, void *), (out, address));
    return ipc_handle(out, address);
}
status cudaIpcOpenMemHandle(void **out, struct ipc handle, unsigned flags) {
    IN_CONTEXT();
    ASK("cuIpcOpenMemHandle_v2", (void **, struct ipc, unsigned), (out, handle, flags));
    return ipc_open(out, handle);
}
status cudaIpcCloseMemHandle(void *address) {
    ASK("cuIpcCloseMemHandle", (void *), (address));
    return OK;
}
status cudaIpcGetEventHandle(struct ipc *out, void *event) { return ipc_handle(out, event); }
status cudaIpcOpenEventHandle(void **out, struct ipc handle) { return ipc_open(out, handle); }

/* Captures. A stream that waits for an event of a capturing stream joins its capture. */

struct member { void *handle, *stream; u64 capture; struct member *next; };
static struct member *streams; /* captured streams, if the driver does not track them */
static struct member *events;  /* the stream of the last record, and its capture */
static u64 captures;

static struct member *member(struct member **list, void *handle, int insert) {
    for (struct member *m = *list; m; m = m->next)
        if (m->handle == handle) return m;
    if (!insert) return NULL;
    struct member *m = malloc(sizeof *m);
    *m = (struct member){handle, NULL, 0, *list};
    return *list = m;
}

static void forget(struct member **list, void *handle) {
    for (; *list; list = &(*list)->next)
        if ((*list)->handle == handle) {
            struct member *found = *list;
            *list = found->next;
            free(found);
            return;
        }
}

status cudaStreamGetCaptureInfo_v2(void *stream, int *state, u64 *id, void **graph, const void **dependencies,
                                   size_t *count) {
    IN_CONTEXT();
    if (id) *id = 0;
    if (graph) *graph = NULL;
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
    ASK("cuStreamGetCaptureInfo_v2", (void *, int *, u64 *, void **, const void **, size_t *),
        (stream, state, id, graph, dependencies, count));
    pthread_mutex_lock(&lock);
    struct member *found = member(&streams, stream, 0);
    u64 capture = found ? found->capture : 0;
    pthread_mutex_unlock(&lock);
    *state = capture ? CAPTURE_ACTIVE : CAPTURE_NONE;
    if (id) *id = capture;
    return OK;
}

/* In CUDA 13 the plain name has more arguments; in CUDA 12 it has three, and torch calls _v2. */
status cudaStreamGetCaptureInfo(void *stream, int *state, u64 *id, void **graph, const void **dependencies,
                                const void **edges, size_t *count) {
    static int version;
    if (!version) {
        status (*runtime)(int *) = (status(*)(int *))dlsym(RTLD_NEXT, "cudaRuntimeGetVersion");
        if (!runtime || runtime(&version) != OK) version = 13000;
    }
    if (version < 13000) return cudaStreamGetCaptureInfo_v2(stream, state, id, NULL, NULL, NULL);
    if (edges) *edges = NULL;
    return cudaStreamGetCaptureInfo_v2(stream, state, id, graph, dependencies, count);
}

status cudaStreamIsCapturing(void *stream, int *state) {
    return cudaStreamGetCaptureInfo_v2(stream, state, NULL, NULL, NULL, NULL);
}

static u64 capture_of(void *stream) {
    int state = CAPTURE_NONE;
    u64 id = 0;
    if (cudaStreamGetCaptureInfo_v2(stream, &state, &id, NULL, NULL, NULL) != OK) return 0;
    return state == CAPTURE_ACTIVE ? id : 0;
}

status cudaStreamBeginCapture(void *stream, int mode) {
    trace("cudaStreamBeginCapture %p", stream);
    IN_CONTEXT();
    if (!stream) return done(CAPTURE_UNSUPPORTED);
    ASK("cuStreamBeginCapture_v2", (void *, int), (stream, mode));
    if (TELL("standin_begin_capture", (int, u64), (device, (uintptr_t)stream))) return OK;
    pthread_mutex_lock(&lock);
    member(&streams, stream, 1)->capture = ++captures;
    pthread_mutex_unlock(&lock);
    return OK;
}

status cudaStreamEndCapture(void *stream, void **graph) {
    trace("cudaStreamEndCapture %p", stream);
    IN_CONTEXT();
    ASK("cuStreamEndCapture", (void *, void **), (stream, graph));
    u64 id = capture_of(stream);
    *graph = NULL;
    if (!id) return done(CAPTURE_INVALIDATED);
    if (!TELL("standin_end_capture", (int, u64), (device, (uintptr_t)stream))) {
        pthread_mutex_lock(&lock);
        for (struct member *m = streams; m; m = m->next)
            if (m->capture == id) m->capture = 0;
        pthread_mutex_unlock(&lock);
    }
    *graph = (void *)(uintptr_t)(0x6000000000 + id);
    return OK;
}

status cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    IN_CONTEXT();
    ASK("cuStreamWaitEvent", (void *, void *, unsigned), (stream, event, flags));
    pthread_mutex_lock(&lock);
    struct member *found = member(&events, event, 0);
    struct member from = found ? *found : (struct member){0};
    pthread_mutex_unlock(&lock);
    /* An event of an ended capture orders nothing in a later one. */
    if (!from.capture || from.capture != capture_of(from.stream)) return OK;
    if (TELL("standin_wait_for", (int, u64, u64), (device, (uintptr_t)stream, (uintptr_t)from.stream))) return OK;
    pthread_mutex_lock(&lock);
    member(&streams, stream, 1)->capture = from.capture;
    pthread_mutex_unlock(&lock);
    return OK;
}

status cudaGraphNodeGetDependencies(void *node, void **out, void *edges, size_t *count) {
    ASK("cuGraphNodeGetDependencies", (void *, void **, size_t *), (node, out, count));
    *count = 0;
    return OK;
}

status cudaThreadExchangeStreamCaptureMode(int *mode) {
    static __thread int held; /* global */
    ASK("cuThreadExchangeStreamCaptureMode", (int *), (mode));
    int before = held;
    held = *mode;
    *mode = before;
    return OK;
}

static void *invent(void) {
    static uintptr_t next = 0x5000000000;
    return (void *)__atomic_add_fetch(&next, 16, __ATOMIC_RELAXED);
}

/* A graph has one node, so that torch does not warn about an empty graph. */
status cudaGraphGetNodes(void *graph, void **nodes, size_t *count) {
    if (nodes && *count) nodes[0] = (void *)0x6100000000;
    *count = 1;
    return OK;
}
status cudaGraphInstantiate(void **out, void *graph, u64 flags) {
    *out = invent();
    return OK;
}
status cudaGraphInstantiateWithFlags(void **out, void *graph, u64 flags) { return cudaGraphInstantiate(out, graph, flags); }
status cudaUserObjectCreate(void **out, void *pointer, void (*destroy)(void *), unsigned count, unsigned flags) {
    *out = invent();
    return OK;
}

/* Graphs hold no memory outside of an allocator. */
status cudaDeviceGetGraphMemAttribute(int ordinal, int which, void *value) {
    *(u64 *)value = 0;
    return OK;
}

/* Streams. */

status cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return OK;
}

status cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    IN_CONTEXT();
    ASK("cuStreamCreateWithPriority", (void **, unsigned, int), (out, flags, priority));
    ASK("cuStreamCreate", (void **, unsigned), (out, flags));
    *out = invent();
    trace("cudaStreamCreate: %p", *out);
    return OK;
}
status cudaStreamCreateWithFlags(void **out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
status cudaStreamCreate(void **out) { return cudaStreamCreateWithPriority(out, 0, 0); }

status cudaStreamDestroy(void *stream) {
    IN_CONTEXT();
    ASK("cuStreamDestroy_v2", (void *), (stream));
    return OK;
}
status cudaStreamGetPriority(void *stream, int *priority) {
    IN_CONTEXT();
    ASK("cuStreamGetPriority", (void *, int *), (stream, priority));
    *priority = 0;
    return OK;
}
status cudaStreamQuery(void *stream) {
    IN_CONTEXT();
    ASK("cuStreamQuery", (void *), (stream));
    return OK;
}
status cudaStreamSynchronize(void *stream) {
    IN_CONTEXT();
    ASK("cuStreamSynchronize", (void *), (stream));
    return OK;
}

status cudaLaunchHostFunc(void *stream, void (*function)(void *), void *argument) {
    int state = CAPTURE_NONE;
    cudaStreamIsCapturing(stream, &state);
    if (state == CAPTURE_NONE) function(argument);
    return OK;
}
status cudaStreamAddCallback(void *stream, void (*function)(void *, status, void *), void *argument, unsigned flags) {
    function(stream, OK, argument);
    return OK;
}

/* Events. */

status cudaEventCreateWithFlags(void **out, unsigned flags) {
    IN_CONTEXT();
    ASK("cuEventCreate", (void **, unsigned), (out, flags));
    *out = invent();
    return OK;
}
status cudaEventCreate(void **out) { return cudaEventCreateWithFlags(out, 0); }

status cudaEventDestroy(void *event) {
    pthread_mutex_lock(&lock);
    forget(&events, event);
    pthread_mutex_unlock(&lock);
    ASK("cuEventDestroy_v2", (void *), (event));
    return OK;
}

status cudaEventRecord(void *event, void *stream) {
    trace("cudaEventRecord %p on %p", event, stream);
    IN_CONTEXT();
    u64 capture = capture_of(stream);
    pthread_mutex_lock(&lock);
    struct member *kept = member(&events, event, 1);
    kept->stream = stream;
    kept->capture = capture;
    pthread_mutex_unlock(&lock);
    ASK("cuEventRecord", (void *, void *), (event, stream));
    return OK;
}
status cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

status cudaEventQuery(void *event) {
    IN_CONTEXT();
    ASK("cuEventQuery", (void *), (event));
    return OK;
}
status cudaEventSynchronize(void *event) {
    IN_CONTEXT();
    ASK("cuEventSynchronize", (void *), (event));
    return OK;
}
status cudaEventElapsedTime(float *milliseconds, void *from, void *to) {
    ASK("cuEventElapsedTime", (float *, void *, void *), (milliseconds, from, to));
    *milliseconds = 0;
    return OK;
}

/* Kernels, which never run. */

status __cudaGetKernel(void **out, const void *function) {
    *out = (void *)function;
    return OK;
}
status cudaGetSymbolAddress(void **out, const void *symbol) {
    *out = (void *)symbol;
    return OK;
}
status cudaFuncGetAttributes(int *out, const void *kernel) {
    memset(out, 0, 144);
    out[6] = 1024; /* maxThreadsPerBlock, after three sizes */
    out[7] = 32;
    out[8] = out[9] = 90;
    return OK;
}
status cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *kernel, int block, size_t shared,
                                                              unsigned flags) {
    *out = 2;
    return OK;
}
status cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *kernel, int block, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(out, kernel, block, shared, 0);
}

/* Functions that succeed without doing anything. */
#define ACCEPTED(name) \
    status name(void) { return OK; }
ACCEPTED(cudaDeviceEnablePeerAccess)
ACCEPTED(cudaMemcpyPeerAsync)
ACCEPTED(cudaMemcpyToSymbol)
ACCEPTED(cudaMemset)
ACCEPTED(cudaMemsetAsync)
ACCEPTED(cudaGraphDestroy)
ACCEPTED(cudaGraphExecDestroy)
ACCEPTED(cudaGraphLaunch)
ACCEPTED(cudaGraphRetainUserObject)
ACCEPTED(cudaUserObjectRelease)
ACCEPTED(cudaLaunchKernel)
ACCEPTED(__cudaLaunchKernel)
ACCEPTED(cudaLaunchKernelExC)
ACCEPTED(cudaFuncSetAttribute)
ACCEPTED(cudaProfilerStart)
ACCEPTED(cudaProfilerStop)
ACCEPTED(cudaDeviceSetGraphMemAttribute)

/* torch's libcaffe2_nvrtc.so links against these; no allocator calls them. */
#define REFUSED(name) \
    status name(void) { return NOT_SUPPORTED; }
REFUSED(cuFuncGetAttribute)
REFUSED(cuFuncSetAttribute)
REFUSED(cuFuncSetCacheConfig)
REFUSED(cuLaunchCooperativeKernel)
REFUSED(cuLaunchKernel)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuLinkCreate_v2)
REFUSED(cuModuleGetFunction)
REFUSED(cuModuleLoad)
REFUSED(cuModuleLoadData)
REFUSED(cuModuleLoadDataEx)
REFUSED(cuModuleUnload)
REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(cuPointerGetAttribute)
REFUSED(cuTensorMapEncodeTiled)
#endif

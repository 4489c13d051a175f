/* A stand-in for the part of the CUDA runtime (cudart) that PyTorch needs to believe in a GPU.
 *
 * Preloaded before an unmodified CUDA build of torch (12 or 13), it answers instead of the real libcudart:
 * devices, contexts, memory, streams, events and captures. Everything else, such as registering kernels, is
 * left to the real one. Nothing is ever computed: device addresses and stream handles are numbers that
 * nobody follows, kernels and copies succeed without doing anything, and what is copied from the device to
 * the host reads as zeros.
 *
 * Where a libcuda.so.1 can be loaded (Cushion's stand-in for the driver) it is asked, as the real runtime
 * would, so that a plug-in that talks to the driver and torch, which talks to the runtime, see one device.
 * Where there is none, or where it lacks a function, the answers come from here: one device of 16 GiB, or
 * what CUDART_STANDIN_DEVICES and CUDART_STANDIN_BYTES say.
 *
 * CUDART_STANDIN_LOG=1 writes each call to stderr. tests/torch/standin.sh builds and runs it. */
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
       NOT_SUPPORTED = 801, CAPTURE_INVALID = 901 };
enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1 };

#ifdef NO_DRIVER
/* Built so, this file is an empty libcuda.so.1 (it has no cuInit) for a machine with none: torch's
 * libcaffe2_nvrtc.so does not load without, and torch then does not initialise. */

status cuCtxGetCurrent(void **context) {
    *context = NULL;
    return OK;
}
status cuCtxSetCurrent(void *context) {
    (void)context;
    return OK;
}
status cuDeviceGet(int *out, int ordinal) {
    *out = ordinal;
    return OK;
}
status cuDeviceGetAttribute(int *out, int which, int ordinal) {
    (void)which, (void)ordinal;
    *out = 0;
    return OK;
}
status cuDevicePrimaryCtxGetState(int ordinal, unsigned *flags, int *active) {
    (void)ordinal;
    *flags = 0;
    *active = 1;
    return OK;
}
status cuDevicePrimaryCtxRetain(void **context, int ordinal) {
    (void)ordinal;
    *context = NULL;
    return OK;
}
status cuGetErrorString(status code, const char **out) {
    (void)code;
    *out = "there is no driver";
    return OK;
}
status cuPointerGetAttribute(void *out, int which, void *address) {
    (void)out, (void)which, (void)address;
    return NOT_SUPPORTED;
}
#else

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int device;
static __thread status last_error;

static void trace(const char *format, ...) {
    static int on = -1;
    if (on < 0) on = getenv("CUDART_STANDIN_LOG") != NULL;
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

/* The driver, where there is one. */

static void *driver(const char *name) {
    static void *library;
    static int tried; /* once: a library that appears later would have its own devices and memory */
    pthread_mutex_lock(&lock);
    if (!tried) {
        tried = 1;
        library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        status (*init)(unsigned) = library ? (status(*)(unsigned))dlsym(library, "cuInit") : NULL;
        status answer = init ? init(0) : NOT_SUPPORTED;
        trace("libcuda.so.1 %s, cuInit %d", library ? "found" : "not found", answer);
        if (answer != OK) library = NULL;
    }
    pthread_mutex_unlock(&lock);
    return library ? dlsym(library, name) : NULL;
}

/* ASK(name, (types), (arguments)): asks the driver and returns, where it knows the name. */
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

static u64 setting(const char *name, u64 otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

/* The runtime works in the primary context of the thread's device; so does a plug-in called from it. */
static status make_current(int ordinal) {
    static status (*get_device)(int *, int), (*retain)(void **, int), (*set_current)(void *);
    static void *contexts[64];
    static int looked;
    if (!looked) {
        get_device = (status(*)(int *, int))driver("cuDeviceGet");
        retain = (status(*)(void **, int))driver("cuDevicePrimaryCtxRetain");
        set_current = (status(*)(void *))driver("cuCtxSetCurrent");
        looked = 1;
    }
    if (!retain || !set_current) return OK;
    if (ordinal < 0 || ordinal >= 64) return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    int handle = ordinal;
    status answer = OK;
    if (!contexts[ordinal]) {
        if (get_device) answer = get_device(&handle, ordinal);
        if (answer == OK) answer = retain(&contexts[ordinal], handle);
    }
    void *context = contexts[ordinal];
    pthread_mutex_unlock(&lock);
    return answer == OK ? set_current(context) : answer;
}

static status current(void) {
    static __thread int ready = -1;
    if (ready == device) return OK;
    status answer = make_current(device);
    if (answer == OK) ready = device;
    return done(answer);
}

#define IN_CONTEXT()                    \
    do {                                \
        status answer_ = current();     \
        if (answer_ != OK) return answer_; \
    } while (0)

/* Devices. */

status cudaGetDeviceCount(int *count) {
    trace("cudaGetDeviceCount");
    ASK("cuDeviceGetCount", (int *), (count));
    *count = (int)setting("CUDART_STANDIN_DEVICES", 1);
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
    (void)device_flags, (void)flags;
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
    return setting("CUDART_STANDIN_BYTES", 16ull << 30);
}

/* The few attributes torch looks at, as an H100 has them; the numbers are those of CUdevice_attribute. */
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
    if (!ask || ask(value, which, ordinal) != OK || *value == 0) *value = attribute(which);
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
    *can = from != to;
    return OK;
}

status cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    (void)peer, (void)flags;
    return OK;
}

static status not_supported(void) { return NOT_SUPPORTED; }

/* torch refuses to go on when a driver function it lists as required is missing; one it never calls may as
 * well refuse when called. */
status cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, u64 flags, int *result) {
    static const char *const suffixes[] = {"_v2", ""};
    char symbol[128];
    (void)version, (void)flags;
    IN_CONTEXT(); /* who asks here calls the driver next */
    *out = NULL;
    for (int i = 0; i < 2 && !*out; i++) {
        snprintf(symbol, sizeof symbol, "%s%s", name, suffixes[i]);
        *out = driver(symbol);
    }
    if (!*out && (!strncmp(name, "cuMem", 5) || !strncmp(name, "cuDeviceGet", 11) ||
                  !strncmp(name, "cuStream", 8) || !strncmp(name, "cuGetError", 10)))
        *out = (void *)not_supported;
    if (result) *result = *out ? 0 : 1;
    trace("driver entry point %s: %s", name, *out == (void *)not_supported ? "refuses" : *out ? "found" : "none");
    return OK;
}

status cudaGetDriverEntryPoint(const char *name, void **out, u64 flags, int *result) {
    return cudaGetDriverEntryPointByVersion(name, out, 12000, flags, result);
}

/* Memory. Only its amount is real. */

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
    if (used[device & 63] + bytes > setting("CUDART_STANDIN_BYTES", 16ull << 30)) {
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
    *total = setting("CUDART_STANDIN_BYTES", 16ull << 30);
    *free_bytes = *total - used[device & 63];
    return OK;
}

status cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    (void)flags;
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
    (void)flags;
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
    (void)flags;
    *out = host;
    return OK;
}

struct pointer_attributes { int type, device; void *device_pointer, *host_pointer; };

/* 0: the host's, 1: the host's and pinned, 2: the device's, which is what the process has no page for. */
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
    if (kind == 2) memset(to, 0, bytes); /* device to host: what was never computed reads as zeros */
    return OK;
}

status cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
    (void)from;
    return copy(to, bytes, kind);
}
status cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    (void)from, (void)stream;
    return copy(to, bytes, kind);
}
status cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         int kind, void *stream) {
    (void)from, (void)from_pitch, (void)stream;
    for (size_t row = 0; row < height; row++) copy((char *)to + row * to_pitch, width, kind);
    return OK;
}
status cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes, void *stream) {
    (void)to, (void)to_device, (void)from, (void)from_device, (void)bytes, (void)stream;
    return OK;
}
status cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, int kind) {
    (void)symbol, (void)from, (void)bytes, (void)offset, (void)kind;
    return OK;
}
status cudaMemset(void *at, int value, size_t bytes) {
    (void)at, (void)value, (void)bytes;
    return OK;
}
status cudaMemsetAsync(void *at, int value, size_t bytes, void *stream) {
    (void)at, (void)value, (void)bytes, (void)stream;
    return OK;
}

/* Between processes a handle is the address, or the event, itself: enough to be handed round in one. */

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

struct member { void *handle; u64 capture; struct member *next; };
static struct member *streams, *events;
static u64 captures;

static u64 *member(struct member **list, void *handle, int insert) {
    for (struct member *m = *list; m; m = m->next)
        if (m->handle == handle) return &m->capture;
    if (!insert) return NULL;
    struct member *m = malloc(sizeof *m);
    *m = (struct member){handle, 0, *list};
    *list = m;
    return &m->capture;
}

static u64 capture_of(void *stream) {
    pthread_mutex_lock(&lock);
    u64 *found = member(&streams, stream, 0);
    u64 id = found ? *found : 0;
    pthread_mutex_unlock(&lock);
    return id;
}

status cudaStreamBeginCapture(void *stream, int mode) {
    trace("cudaStreamBeginCapture %p", stream);
    IN_CONTEXT();
    ASK("cuStreamBeginCapture_v2", (void *, int), (stream, mode));
    if (!stream) return done(900);
    pthread_mutex_lock(&lock);
    *member(&streams, stream, 1) = ++captures;
    pthread_mutex_unlock(&lock);
    return OK;
}

status cudaStreamEndCapture(void *stream, void **graph) {
    trace("cudaStreamEndCapture %p", stream);
    IN_CONTEXT();
    ASK("cuStreamEndCapture", (void *, void **), (stream, graph));
    u64 id = capture_of(stream);
    *graph = NULL;
    if (!id) return done(CAPTURE_INVALID);
    pthread_mutex_lock(&lock);
    for (struct member *m = streams; m; m = m->next)
        if (m->capture == id) m->capture = 0;
    for (struct member *m = events; m; m = m->next)
        if (m->capture == id) m->capture = 0;
    pthread_mutex_unlock(&lock);
    *graph = (void *)(uintptr_t)(0x6000000000 + id);
    return OK;
}

status cudaStreamIsCapturing(void *stream, int *state) {
    IN_CONTEXT();
    ASK("cuStreamIsCapturing", (void *, int *), (stream, state));
    *state = capture_of(stream) ? CAPTURE_ACTIVE : CAPTURE_NONE;
    return OK;
}

static status capture_info(void *stream, int *state, u64 *id) {
    IN_CONTEXT();
    ASK("cuStreamGetCaptureInfo_v2", (void *, int *, u64 *, void **, const void **, size_t *),
        (stream, state, id, NULL, NULL, NULL));
    u64 found = capture_of(stream);
    *state = found ? CAPTURE_ACTIVE : CAPTURE_NONE;
    if (id) *id = found;
    return OK;
}

status cudaStreamGetCaptureInfo_v2(void *stream, int *state, u64 *id, void **graph, const void **dependencies,
                                   size_t *count) {
    status answer = capture_info(stream, state, id);
    if (graph) *graph = (void *)(uintptr_t)0x6000000000;
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
    return answer;
}

/* CUDA 13 gave the plain name more arguments; CUDA 12 has it with three, and torch asks there for _v2. */
status cudaStreamGetCaptureInfo(void *stream, int *state, u64 *id, void **graph, const void **dependencies,
                                const void **edges, size_t *count) {
    static int version;
    status (*runtime)(int *) = (status(*)(int *))dlsym(RTLD_NEXT, "cudaRuntimeGetVersion");
    if (!version && (!runtime || runtime(&version) != OK)) version = 13000;
    if (version < 13000) return capture_info(stream, state, id);
    if (edges) *edges = NULL;
    return cudaStreamGetCaptureInfo_v2(stream, state, id, graph, dependencies, count);
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

/* A graph has one node, so that torch does not warn of an empty one. */
status cudaGraphGetNodes(void *graph, void **nodes, size_t *count) {
    (void)graph;
    if (nodes && *count) nodes[0] = (void *)0x6100000000;
    *count = 1;
    return OK;
}
status cudaGraphInstantiate(void **out, void *graph, u64 flags) {
    (void)graph, (void)flags;
    *out = invent();
    return OK;
}
status cudaGraphInstantiateWithFlags(void **out, void *graph, u64 flags) { return cudaGraphInstantiate(out, graph, flags); }
status cudaGraphLaunch(void *graph, void *stream) {
    trace("cudaGraphLaunch %p on %p", graph, stream);
    return OK;
}
status cudaGraphDestroy(void *graph) {
    (void)graph;
    return OK;
}
status cudaGraphExecDestroy(void *graph) {
    (void)graph;
    return OK;
}
status cudaGraphRetainUserObject(void *graph, void *object, unsigned count, unsigned flags) {
    (void)graph, (void)object, (void)count, (void)flags;
    return OK;
}
status cudaUserObjectCreate(void **out, void *pointer, void (*destroy)(void *), unsigned count, unsigned flags) {
    (void)pointer, (void)destroy, (void)count, (void)flags;
    *out = invent();
    return OK;
}
status cudaUserObjectRelease(void *object, unsigned count) {
    (void)object, (void)count;
    return OK;
}

/* Memory that graphs hold outside of any allocator: none. */
status cudaDeviceGetGraphMemAttribute(int ordinal, int which, void *value) {
    (void)ordinal, (void)which;
    *(u64 *)value = 0;
    return OK;
}
status cudaDeviceSetGraphMemAttribute(int ordinal, int which, void *value) {
    (void)ordinal, (void)which, (void)value;
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
    *out = invent();
    trace("cudaStreamCreate: %p", *out);
    return OK;
}
status cudaStreamCreateWithFlags(void **out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
status cudaStreamCreate(void **out) { return cudaStreamCreateWithPriority(out, 0, 0); }

status cudaStreamDestroy(void *stream) {
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

status cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    IN_CONTEXT();
    ASK("cuStreamWaitEvent", (void *, void *, unsigned), (stream, event, flags));
    pthread_mutex_lock(&lock);
    u64 *from = member(&events, event, 0);
    if (from && *from) *member(&streams, stream, 1) = *from;
    pthread_mutex_unlock(&lock);
    return OK;
}

status cudaLaunchHostFunc(void *stream, void (*function)(void *), void *argument) {
    int state = CAPTURE_NONE;
    cudaStreamIsCapturing(stream, &state);
    if (state == CAPTURE_NONE) function(argument);
    return OK;
}
status cudaStreamAddCallback(void *stream, void (*function)(void *, status, void *), void *argument, unsigned flags) {
    (void)flags;
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
    ASK("cuEventDestroy_v2", (void *), (event));
    pthread_mutex_lock(&lock);
    for (struct member **m = &events; *m; m = &(*m)->next)
        if ((*m)->handle == event) {
            struct member *found = *m;
            *m = found->next;
            free(found);
            break;
        }
    pthread_mutex_unlock(&lock);
    return OK;
}

status cudaEventRecord(void *event, void *stream) {
    trace("cudaEventRecord %p on %p", event, stream);
    IN_CONTEXT();
    ASK("cuEventRecord", (void *, void *), (event, stream));
    u64 id = capture_of(stream);
    pthread_mutex_lock(&lock);
    *member(&events, event, 1) = id;
    pthread_mutex_unlock(&lock);
    return OK;
}
status cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
    (void)flags;
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

struct dim3 { unsigned x, y, z; };

status cudaLaunchKernel(const void *kernel, struct dim3 grid, struct dim3 block, void **arguments, size_t shared,
                        void *stream) {
    (void)grid, (void)block, (void)arguments, (void)shared;
    trace("kernel %p on %p", kernel, stream);
    return OK;
}
status __cudaLaunchKernel(const void *kernel, struct dim3 grid, struct dim3 block, void **arguments, size_t shared,
                          void *stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
status cudaLaunchKernelExC(const void *config, const void *kernel, void **arguments) {
    (void)config, (void)kernel, (void)arguments;
    return OK;
}
status __cudaGetKernel(void **out, const void *function) {
    *out = (void *)function;
    return OK;
}
status cudaGetSymbolAddress(void **out, const void *symbol) {
    *out = (void *)symbol;
    return OK;
}
status cudaFuncGetAttributes(int *out, const void *kernel) {
    (void)kernel;
    memset(out, 0, 144);
    out[6] = 1024; /* maxThreadsPerBlock, after three sizes */
    out[7] = 32;
    out[8] = out[9] = 90;
    return OK;
}
status cudaFuncSetAttribute(const void *kernel, int which, int value) {
    (void)kernel, (void)which, (void)value;
    return OK;
}
status cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *kernel, int block, size_t shared,
                                                              unsigned flags) {
    (void)kernel, (void)block, (void)shared, (void)flags;
    *out = 2;
    return OK;
}
status cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *kernel, int block, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(out, kernel, block, shared, 0);
}
status cudaProfilerStart(void) { return OK; }
status cudaProfilerStop(void) { return OK; }

/* What torch's libcaffe2_nvrtc.so links against and no allocator calls: there, so that it loads. */
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
REFUSED(cuTensorMapEncodeTiled)
#endif

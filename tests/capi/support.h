/*
 * Shared by both programs: checks that stay in release builds, the choice of the device under test, and the functions
 * of the CUDA driver that write and read device memory. No header of CUDA's is needed.
 */
#ifndef CUSHION_TESTS_SUPPORT_H
#define CUSHION_TESTS_SUPPORT_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cushion.h>

static const char *program_name;
static const char *test_name;

static void failed(int line, const char *what) {
    printf("%s: FAILED: %s: line %d: %s (last error: %s)\n", program_name, test_name, line, what, cushion_last_error());
    fflush(stdout);
    _Exit(1);
}

#define CHECK(condition) ((condition) ? (void)0 : failed(__LINE__, #condition))
#define CHECK_STATUS(wanted, call) \
    do { \
        cushion_status status_ = (call); \
        if (status_ != (wanted)) { \
            printf("%s: wanted %s, not %s\n", program_name, #wanted, cushion_status_name(status_)); \
            failed(__LINE__, #call); \
        } \
    } while (0)
#define CHECK_SAYS(part) CHECK(strstr(cushion_last_error(), part) != NULL)
#define RUN(test) \
    do { \
        test_name = #test; \
        test(); \
        printf("%s: ok: %s\n", program_name, #test); \
    } while (0)

/* Whether the device under test is a GPU; otherwise it is simulated. */
static int on_gpu;

/* Reads the argument. Without one, uses a GPU if there is one. With `cuda` and no GPU, skips the program. */
static void begin(const char *program, int count, char **arguments) {
    const char *wanted = count > 1 ? arguments[1] : "any";
    program_name = program;
    test_name = "begin";
    if (count > 2 || (count == 2 && strcmp(wanted, "cuda") != 0 && strcmp(wanted, "simulated") != 0)) {
        printf("usage: %s [cuda|simulated]\n", program);
        exit(2);
    }
    if (strcmp(wanted, "simulated") != 0) {
        cushion_device *gpu;
        cushion_status status = cushion_device_cuda(0, "", &gpu);
        if (status == CUSHION_NO_DEVICE && strcmp(wanted, "cuda") == 0) {
            printf("%s: SKIPPED: %s\n", program_name, cushion_last_error());
            exit(0);
        }
        if (status != CUSHION_NO_DEVICE) {
            CHECK_STATUS(CUSHION_OK, status);
            CHECK_STATUS(CUSHION_OK, cushion_device_destroy(gpu));
            on_gpu = 1;
        }
    }
    printf("%s: on %s\n", program_name, on_gpu ? "the first GPU" : "a simulated device");
}

/* Prints the last line of a program that passed. */
static void end(void) { puts("ok"); }

/* Functions of the CUDA driver, with the library they are from. */
typedef struct driver {
    int (*retain)(void **, int);
    int (*release)(int);
    int (*push)(void *);
    int (*pop)(void **);
    int (*stream_create)(void **, unsigned);
    int (*stream_destroy)(void *);
    int (*stream_synchronize)(void *);
    int (*fill)(uint64_t, unsigned char, size_t, void *);
    int (*copy_to_host)(void *, uint64_t, size_t, void *);
    void *library;
} driver;

static void find(void *library, const char *name, void *function) {
    void *found = dlsym(library, name);
    CHECK(found != NULL);
    memcpy(function, &found, sizeof found);
}

static driver driver_open(void) {
    driver cuda;
    void *context;
    cuda.library = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(cuda.library != NULL);
    find(cuda.library, "cuDevicePrimaryCtxRetain", &cuda.retain);
    find(cuda.library, "cuDevicePrimaryCtxRelease_v2", &cuda.release);
    find(cuda.library, "cuCtxPushCurrent_v2", &cuda.push);
    find(cuda.library, "cuCtxPopCurrent_v2", &cuda.pop);
    find(cuda.library, "cuStreamCreate", &cuda.stream_create);
    find(cuda.library, "cuStreamDestroy_v2", &cuda.stream_destroy);
    find(cuda.library, "cuStreamSynchronize", &cuda.stream_synchronize);
    find(cuda.library, "cuMemsetD8Async", &cuda.fill);
    find(cuda.library, "cuMemcpyDtoHAsync_v2", &cuda.copy_to_host);
    CHECK(cuda.retain(&context, 0) == 0);
    CHECK(cuda.push(context) == 0);
    return cuda;
}

static void driver_close(driver *cuda) {
    void *context;
    CHECK(cuda->pop(&context) == 0);
    CHECK(cuda->release(0) == 0);
    dlclose(cuda->library);
}

/* Fills memory on the device and checks a copy on the host. */
static void check_real(driver *cuda, void *memory, size_t bytes, unsigned char value, void *stream) {
    uint64_t address = (uint64_t)(uintptr_t)memory;
    unsigned char *host = (unsigned char *)malloc(bytes);
    size_t i;
    CHECK(host != NULL);
    memset(host, value + 1, bytes);
    CHECK(cuda->fill(address, value, bytes, stream) == 0);
    CHECK(cuda->copy_to_host(host, address, bytes, stream) == 0);
    CHECK(cuda->stream_synchronize(stream) == 0);
    for (i = 0; i < bytes; i++) CHECK(host[i] == value);
    free(host);
}

#endif

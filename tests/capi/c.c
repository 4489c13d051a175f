/* Tests every function of cushion.h from C: `c [cuda|simulated]`. */
#include <math.h>
#include <pthread.h>
#include <sched.h>

#include "support.h"

#define MIB ((size_t)1 << 20)
#define THREADS 8

/* A conf string for each policy. */
static const char *const POLICIES[] = {"", "expandable_segments:True", "paged:False"};

/* Makes the device under test, with a cache of its own. */
static cushion_device *make(const char *conf) {
    cushion_device *device = NULL;
    CHECK_STATUS(CUSHION_OK, on_gpu ? cushion_device_cuda(0, conf, &device)
                                    : cushion_device_simulated(1024 * MIB, conf, &device));
    CHECK(device != NULL);
    return device;
}

static void *stream(int number) { return (void *)(uintptr_t)number; }

static cushion_statistics stats_of(cushion_device *device) {
    cushion_statistics stats;
    stats.struct_size = sizeof stats;
    CHECK_STATUS(CUSHION_OK, cushion_stats(device, &stats));
    CHECK(stats.struct_size == sizeof stats);
    return stats;
}

static void names(void) {
    CHECK(strcmp(cushion_version(), CUSHION_VERSION) == 0);
    CHECK(strcmp(cushion_status_name(CUSHION_OK), "CUSHION_OK") == 0);
    CHECK(strcmp(cushion_status_name(CUSHION_UNKNOWN_ADDRESS), "CUSHION_UNKNOWN_ADDRESS") == 0);
    CHECK(strcmp(cushion_status_name(CUSHION_INTERNAL), "CUSHION_INTERNAL") == 0);
    CHECK(strcmp(cushion_status_name((cushion_status)1000), "unknown status") == 0);
}

static void invalid_devices(void) {
    cushion_device *device = (cushion_device *)stream(1);
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_device_simulated(MIB, NULL, NULL));
    CHECK_SAYS("`out` is NULL");
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_device_cuda(0, NULL, NULL));
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_device_simulated(MIB, "\xff", &device));
    CHECK_SAYS("not UTF-8");
    CHECK(device == NULL);
    CHECK_STATUS(CUSHION_INVALID_OPTION, cushion_device_simulated(MIB, "max_split:1", &device));
    CHECK_SAYS("unknown option `max_split`");
    CHECK_STATUS(CUSHION_INVALID_OPTION, cushion_device_cuda(0, "expandable_segments:perhaps", &device));
    CHECK_SAYS("expandable_segments");
    CHECK_STATUS(CUSHION_NO_DEVICE, cushion_device_cuda(-1, NULL, &device));
    CHECK_STATUS(CUSHION_NO_DEVICE, cushion_device_cuda(1000, NULL, &device));
    CHECK_STATUS(CUSHION_NO_DEVICE, cushion_device_cuda(1000, "", &device));
    CHECK(device == NULL);
}

/* Every function refuses a handle that is not a device. */
static void refuse(cushion_device *device) {
    size_t size = 1, total = 1;
    void *memory = &size;
    cushion_statistics stats;
    stats.struct_size = sizeof stats;
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_alloc(device, 1, NULL, &memory));
    CHECK(memory == NULL);
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_alloc(device, 0, NULL, &memory));
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_free(device, NULL));
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_record_stream(device, NULL, NULL));
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_size_of(device, NULL, &size));
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_empty_cache(device));
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_set_memory_fraction(device, 1.0));
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_memory_info(device, &size, &total));
    CHECK(size == 0 && total == 0);
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_stats(device, &stats));
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_reset_peak_stats(device));
}

static void destroyed_devices(void) {
    int on_the_stack;
    cushion_device *device = make("");
    CHECK_STATUS(CUSHION_OK, cushion_device_destroy(device));
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_device_destroy(device));
    CHECK_SAYS("is no device");
    refuse(device);
    refuse(NULL);
    CHECK_SAYS("`device` is NULL");
    refuse((cushion_device *)(void *)&on_the_stack);
    CHECK_STATUS(CUSHION_OK, cushion_device_destroy(NULL));
}

static void memory(void) {
    cushion_device *device = make("");
    void *first, *again, *none = &first;
    size_t size;
    CHECK_STATUS(CUSHION_OK, cushion_alloc(device, 0, NULL, &none));
    CHECK(none == NULL);
    CHECK_STATUS(CUSHION_OK, cushion_free(device, NULL));
    CHECK_STATUS(CUSHION_OK, cushion_size_of(device, NULL, &size));
    CHECK(size == 0);

    CHECK_STATUS(CUSHION_OK, cushion_alloc(device, 1000, NULL, &first));
    CHECK(first != NULL && (uintptr_t)first % 512 == 0);
    CHECK_STATUS(CUSHION_OK, cushion_size_of(device, first, &size));
    CHECK(size == 1024);
    CHECK_STATUS(CUSHION_UNKNOWN_ADDRESS, cushion_size_of(device, (char *)first + 512, &size));
    CHECK(size == 0);
    CHECK_STATUS(CUSHION_UNKNOWN_ADDRESS, cushion_free(device, (char *)first + 1));
    CHECK_STATUS(CUSHION_OK, cushion_free(device, first));
    CHECK_STATUS(CUSHION_UNKNOWN_ADDRESS, cushion_free(device, first));
    CHECK_SAYS("freed before");
    CHECK_STATUS(CUSHION_UNKNOWN_ADDRESS, cushion_record_stream(device, first, NULL));

    CHECK_STATUS(CUSHION_OK, cushion_alloc(device, 900, NULL, &again));
    CHECK(again == first);
    CHECK_STATUS(CUSHION_OK, cushion_free(device, again));

    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_alloc(device, 1, NULL, NULL));
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_size_of(device, first, NULL));
    CHECK_STATUS(CUSHION_OK, cushion_device_destroy(device));
}

static void streams(void) {
    cushion_device *device = make("");
    void *one = stream(1), *two = stream(2), *a, *b, *c;
    driver cuda;
    if (on_gpu) {
        cuda = driver_open();
        CHECK(cuda.stream_create(&one, 1) == 0);
        CHECK(cuda.stream_create(&two, 1) == 0);
        /* 2 is CUDA's handle for the per-thread default stream. */
        CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_alloc(device, MIB, stream(2), &a));
        CHECK(a == NULL);
        CHECK(strstr(cushion_last_error(), "per-thread") != NULL);
    }
    CHECK_STATUS(CUSHION_OK, cushion_alloc(device, MIB, one, &a));
    CHECK_STATUS(CUSHION_OK, cushion_free(device, a));
    CHECK_STATUS(CUSHION_OK, cushion_alloc(device, MIB, two, &b));
    CHECK(a != b);
    CHECK_STATUS(CUSHION_OK, cushion_record_stream(device, b, one));
    CHECK_STATUS(CUSHION_OK, cushion_record_stream(device, NULL, one));
    CHECK_STATUS(CUSHION_OK, cushion_free(device, b));
    CHECK_STATUS(CUSHION_OK, cushion_empty_cache(device));
    CHECK(stats_of(device).active_bytes == 0);
    CHECK_STATUS(CUSHION_OK, cushion_alloc(device, MIB, two, &c));
    CHECK_STATUS(CUSHION_OK, cushion_free(device, c));
    CHECK_STATUS(CUSHION_OK, cushion_device_destroy(device));
    if (on_gpu) {
        CHECK(cuda.stream_destroy(one) == 0);
        CHECK(cuda.stream_destroy(two) == 0);
        driver_close(&cuda);
    }
}

static void statistics(void) {
    /* PyTorch's segments: 2 MiB for small requests, 20 MiB for requests up to 10 MiB. */
    cushion_device *device = make("paged:False");
    cushion_statistics stats;
    struct {
        cushion_statistics known;
        uint64_t later;
    } grown;
    void *a, *b;
    CHECK_STATUS(CUSHION_OK, cushion_alloc(device, 1000, NULL, &a));
    CHECK_STATUS(CUSHION_OK, cushion_alloc(device, 3 * MIB, NULL, &b));
    stats = stats_of(device);
    CHECK(stats.allocated_bytes == 1024 + 3 * MIB && stats.allocated_bytes_peak == stats.allocated_bytes);
    CHECK(stats.reserved_bytes == 22 * MIB && stats.reserved_bytes_peak == stats.reserved_bytes);
    CHECK(stats.requested_bytes == 1000 + 3 * MIB && stats.requested_bytes_peak == stats.requested_bytes);
    CHECK(stats.active_bytes == stats.allocated_bytes && stats.active_bytes_peak == stats.active_bytes);
    CHECK(stats.allocations == 2 && stats.frees == 0);
    CHECK(stats.blocks == 4 && stats.free_blocks == 2);
    CHECK(stats.cached_bytes == stats.reserved_bytes - stats.allocated_bytes);
    CHECK(stats.largest_free_block == 17 * MIB);
    CHECK(stats.hits == 0 && stats.misses == 2 && stats.retries == 0 && stats.ooms == 0);

    CHECK_STATUS(CUSHION_OK, cushion_free(device, b));
    CHECK_STATUS(CUSHION_OK, cushion_alloc(device, 2 * MIB, NULL, &b));
    stats = stats_of(device);
    CHECK(stats.allocated_bytes == 1024 + 2 * MIB && stats.allocated_bytes_peak == 1024 + 3 * MIB);
    CHECK(stats.allocations == 3 && stats.frees == 1 && stats.hits == 1);
    CHECK_STATUS(CUSHION_OK, cushion_reset_peak_stats(device));
    stats = stats_of(device);
    CHECK(stats.allocated_bytes_peak == stats.allocated_bytes && stats.requested_bytes_peak == 1000 + 2 * MIB);

    CHECK_STATUS(CUSHION_OK, cushion_free(device, a));
    CHECK_STATUS(CUSHION_OK, cushion_free(device, b));
    CHECK(stats_of(device).reserved_bytes == 22 * MIB);
    CHECK_STATUS(CUSHION_OK, cushion_empty_cache(device));
    stats = stats_of(device);
    CHECK(stats.reserved_bytes == 0 && stats.blocks == 0 && stats.reserved_bytes_peak == 22 * MIB);

    /* A missing size is an error. Fields of a newer caller that the library does not know are left alone. */
    stats.struct_size = 0;
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_stats(device, &stats));
    CHECK_SAYS("struct_size");
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_stats(device, NULL));
    grown.known.struct_size = sizeof grown;
    grown.later = 77;
    CHECK_STATUS(CUSHION_OK, cushion_stats(device, &grown.known));
    CHECK(grown.known.struct_size == sizeof grown.known && grown.known.allocations == 3 && grown.later == 77);
    CHECK_STATUS(CUSHION_OK, cushion_device_destroy(device));
}

static void out_of_memory(void) {
    cushion_device *device = make("");
    size_t available, total, limit;
    void *memory = &total, *small;
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_memory_info(device, NULL, &total));
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_memory_info(device, &available, NULL));
    CHECK_STATUS(CUSHION_OK, cushion_memory_info(device, &available, &total));
    CHECK(available > 0 && available <= total);
    CHECK_STATUS(CUSHION_OUT_OF_MEMORY, cushion_alloc(device, SIZE_MAX, NULL, &memory));
    CHECK(memory == NULL);
    CHECK_STATUS(CUSHION_OUT_OF_MEMORY, cushion_alloc(device, total + 1, NULL, &memory));
    CHECK_SAYS("out of memory, and it can never fit: ");

    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_set_memory_fraction(device, 1.5));
    CHECK_SAYS("1.5");
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_set_memory_fraction(device, -0.5));
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_set_memory_fraction(device, NAN));
    CHECK_STATUS(CUSHION_OK, cushion_set_memory_fraction(device, 0.25));
    limit = total / 4 / (2 * MIB) * (2 * MIB); /* whole pages: this size would fit alone */
    CHECK_STATUS(CUSHION_OK, cushion_alloc(device, 1000, NULL, &small));
    CHECK_STATUS(CUSHION_OUT_OF_MEMORY, cushion_alloc(device, limit, NULL, &memory));
    CHECK_SAYS("out of memory: ");
    CHECK_SAYS("this process may hold");
    CHECK(memory == NULL);
    CHECK(stats_of(device).ooms == 3 && stats_of(device).allocated_bytes == 1024);
    CHECK_STATUS(CUSHION_OK, cushion_alloc(device, 3 * MIB, NULL, &memory));
    CHECK_STATUS(CUSHION_OK, cushion_free(device, memory));
    CHECK_STATUS(CUSHION_OK, cushion_set_memory_fraction(device, 1.0));
    CHECK_STATUS(CUSHION_OK, cushion_free(device, small));
    CHECK_STATUS(CUSHION_OK, cushion_device_destroy(device));
}

/* Extreme sizes are served or refused, with no other result. */
static void odd_sizes(void) {
    const size_t capacities[] = {0, 1, MIB, SIZE_MAX / 2, SIZE_MAX};
    const size_t sizes[] = {1, 511, MIB + 1, SIZE_MAX / 2, SIZE_MAX - 511, SIZE_MAX};
    const size_t kinds = sizeof capacities / sizeof *capacities;
    size_t i, j;
    for (i = 0; i < 2 * kinds; i++) {
        cushion_device *device;
        const char *conf = i < kinds ? NULL : "paged:False";
        CHECK_STATUS(CUSHION_OK, cushion_device_simulated(capacities[i % kinds], conf, &device));
        for (j = 0; j < sizeof sizes / sizeof *sizes; j++) {
            void *memory;
            cushion_status status = cushion_alloc(device, sizes[j], NULL, &memory);
            CHECK(status == CUSHION_OK ? memory != NULL : status == CUSHION_OUT_OF_MEMORY && memory == NULL);
            CHECK_STATUS(CUSHION_OK, cushion_free(device, memory));
        }
        CHECK_STATUS(CUSHION_OK, cushion_device_destroy(device));
    }
}

static void options(void) {
    cushion_device *device = make("expandable_segments:True,per_process_memory_fraction:0.5");
    size_t available, total;
    void *memory, *refused;
    CHECK_STATUS(CUSHION_OK, cushion_alloc(device, 12 * MIB, NULL, &memory));
    /* One page of 20 MiB, not a segment of 12 MiB. */
    CHECK(stats_of(device).reserved_bytes == 20 * MIB);
    CHECK_STATUS(CUSHION_OK, cushion_memory_info(device, &available, &total));
    CHECK_STATUS(CUSHION_OUT_OF_MEMORY, cushion_alloc(device, total / 2, NULL, &refused));
    CHECK_STATUS(CUSHION_OK, cushion_free(device, memory));
    CHECK_STATUS(CUSHION_OK, cushion_device_destroy(device));
}

static void destroying_a_device_frees_live_memory(void) {
    cushion_device *device = make("");
    size_t before = 0, after = 0, total;
    void *memory[3];
    int i;
    if (on_gpu) CHECK_STATUS(CUSHION_OK, cushion_memory_info(device, &before, &total));
    for (i = 0; i < 3; i++) CHECK_STATUS(CUSHION_OK, cushion_alloc(device, 64 * MIB, stream(0), &memory[i]));
    CHECK_STATUS(CUSHION_OK, cushion_free(device, memory[1]));
    CHECK_STATUS(CUSHION_STILL_LIVE, cushion_device_destroy(device));
    CHECK_SAYS("2 allocations, 134217728 bytes");
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_free(device, memory[0]));
    if (on_gpu) {
        device = make("");
        CHECK_STATUS(CUSHION_OK, cushion_memory_info(device, &after, &total));
        CHECK_STATUS(CUSHION_OK, cushion_device_destroy(device));
        /* Other processes may use the GPU too, but a leak of 128 MiB would show. */
        CHECK(after + 64 * MIB > before);
    }
}

static void handles_without_conf_share_a_cache(void) {
    cushion_device *one, *other;
    void *memory;
    uint64_t before;
    CHECK_STATUS(CUSHION_OK, cushion_device_cuda(0, NULL, &one));
    CHECK_STATUS(CUSHION_OK, cushion_device_cuda(0, NULL, &other));
    CHECK(one != other);
    before = stats_of(one).allocated_bytes;
    CHECK_STATUS(CUSHION_OK, cushion_alloc(one, 1000, NULL, &memory));
    CHECK(stats_of(other).allocated_bytes == before + 1024);
    CHECK_STATUS(CUSHION_OK, cushion_device_destroy(one));
    refuse(one);
    CHECK(stats_of(other).allocated_bytes == before + 1024);
    CHECK_STATUS(CUSHION_OK, cushion_free(other, memory));
    CHECK_STATUS(CUSHION_OK, cushion_empty_cache(other));
    CHECK_STATUS(CUSHION_OK, cushion_device_destroy(other));
}

static void memory_can_be_written_and_read(void) {
    int i;
    driver cuda = driver_open();
    for (i = 0; i < 3; i++) {
        cushion_device *device = make(POLICIES[i]);
        void *one, *a, *b;
        CHECK(cuda.stream_create(&one, 1) == 0);
        CHECK_STATUS(CUSHION_OK, cushion_alloc(device, 3 * MIB, one, &a));
        CHECK_STATUS(CUSHION_OK, cushion_alloc(device, 1000, one, &b));
        check_real(&cuda, a, 3 * MIB, 0x5a, one);
        check_real(&cuda, b, 1000, 0xa5, one);
        CHECK_STATUS(CUSHION_OK, cushion_free(device, a));
        CHECK_STATUS(CUSHION_OK, cushion_free(device, b));
        CHECK_STATUS(CUSHION_OK, cushion_device_destroy(device));
        CHECK(cuda.stream_destroy(one) == 0);
    }
    driver_close(&cuda);
}

static cushion_device *shared;

static void *work(void *number) {
    uintptr_t self = (uintptr_t)number;
    unsigned i;
    char own[32];
    snprintf(own, sizeof own, "starts at 0x%x:", (unsigned)(self * 16 + 1));
    for (i = 0; i < 1000; i++) {
        void *a, *b;
        size_t bytes = 1 + (i * 7919 + self) % 65536, size;
        CHECK_STATUS(CUSHION_OK, cushion_alloc(shared, bytes, NULL, &a));
        CHECK_STATUS(CUSHION_OK, cushion_alloc(shared, MIB, NULL, &b));
        CHECK_STATUS(CUSHION_OK, cushion_size_of(shared, a, &size));
        CHECK(size >= bytes && a != b);
        CHECK_STATUS(CUSHION_UNKNOWN_ADDRESS, cushion_free(shared, (void *)(self * 16 + 1)));
        CHECK_STATUS(CUSHION_OK, cushion_free(shared, b));
        CHECK_STATUS(CUSHION_OK, cushion_free(shared, a));
        /* Each thread has its own last error. */
        CHECK_SAYS(own);
    }
    return NULL;
}

static void threads(void) {
    pthread_t running[THREADS];
    cushion_statistics stats;
    uintptr_t i;
    shared = make("");
    for (i = 0; i < THREADS; i++) CHECK(pthread_create(&running[i], NULL, work, (void *)i) == 0);
    for (i = 0; i < THREADS; i++) CHECK(pthread_join(running[i], NULL) == 0);
    stats = stats_of(shared);
    CHECK(stats.allocations == THREADS * 2000 && stats.frees == stats.allocations && stats.allocated_bytes == 0);
    CHECK_STATUS(CUSHION_OK, cushion_device_destroy(shared));
}

static void *work_until_refused(void *unused) {
    (void)unused;
    for (;;) {
        void *memory;
        cushion_status status = cushion_alloc(shared, 1000, NULL, &memory);
        if (status == CUSHION_OK) status = cushion_free(shared, memory);
        if (status == CUSHION_INVALID_ARGUMENT) return NULL;
        CHECK_STATUS(CUSHION_OK, status);
    }
}

static void destroying_a_device_while_other_threads_use_it(void) {
    pthread_t running[THREADS];
    cushion_status status;
    int i;
    shared = make("");
    for (i = 0; i < THREADS; i++) CHECK(pthread_create(&running[i], NULL, work_until_refused, NULL) == 0);
    while (stats_of(shared).allocations < 1000) sched_yield();
    status = cushion_device_destroy(shared);
    CHECK(status == CUSHION_OK || status == CUSHION_STILL_LIVE);
    for (i = 0; i < THREADS; i++) CHECK(pthread_join(running[i], NULL) == 0);
}

static void limit_of_1024_devices(void) {
    static cushion_device *made[1025];
    int count = 0, i;
    while (cushion_device_simulated(MIB, NULL, &made[count]) == CUSHION_OK) CHECK(++count < 1025);
    CHECK(count == 1024);
    CHECK_SAYS("1024 devices are in use");
    for (i = 0; i < count; i++) CHECK_STATUS(CUSHION_OK, cushion_device_destroy(made[i]));
}

int main(int count, char **arguments) {
    int silent = strcmp(cushion_last_error(), "") == 0;
    begin("capi_c", count, arguments);
    CHECK(silent);
    RUN(names);
    RUN(invalid_devices);
    RUN(destroyed_devices);
    RUN(memory);
    RUN(streams);
    RUN(statistics);
    RUN(out_of_memory);
    RUN(odd_sizes);
    RUN(options);
    RUN(destroying_a_device_frees_live_memory);
    RUN(threads);
    RUN(destroying_a_device_while_other_threads_use_it);
    RUN(limit_of_1024_devices);
    if (on_gpu) {
        RUN(handles_without_conf_share_a_cache);
        RUN(memory_can_be_written_and_read);
    }
    end();
    return 0;
}

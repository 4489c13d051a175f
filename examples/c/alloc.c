/*
 * Allocates memory from C: cc alloc.c $(pkg-config --cflags --libs cushion) && ./a.out
 *
 * On a machine without a GPU it uses a simulated device.
 */
#include <stdio.h>
#include <stdlib.h>

#include <cushion.h>

static void check(cushion_status status) {
    if (status != CUSHION_OK) {
        fprintf(stderr, "%s: %s\n", cushion_status_name(status), cushion_last_error());
        exit(1);
    }
}

int main(void) {
    const size_t mib = (size_t)1 << 20;
    cushion_device *gpu;
    cushion_statistics stats;
    void *weights, *scratch, *refused;
    void *stream = NULL; /* a cudaStream_t or a CUstream; NULL is the default stream */

    cushion_status status = cushion_device_cuda(0, NULL, &gpu);
    if (status == CUSHION_NO_DEVICE) {
        printf("no GPU (%s): using a simulated device of 1 GiB\n", cushion_last_error());
        status = cushion_device_simulated(1024 * mib, NULL, &gpu);
    }
    check(status);

    check(cushion_alloc(gpu, 600 * mib, stream, &weights));
    check(cushion_alloc(gpu, 100 * mib, stream, &scratch));
    /* ... kernels on `stream` that use both ... */

    /* The freed block stays in the cache. The next allocation on this stream may get the same address. */
    check(cushion_free(gpu, scratch));
    check(cushion_alloc(gpu, 90 * mib, stream, &scratch));

    /* Out of memory is an ordinary status: the program goes on. */
    status = cushion_alloc(gpu, SIZE_MAX / 2, stream, &refused);
    printf("%s: %s\n", cushion_status_name(status), cushion_last_error());

    stats.struct_size = sizeof stats;
    check(cushion_stats(gpu, &stats));
    printf("%llu MiB in use, %llu MiB reserved, %llu of %llu allocations served from the cache\n",
           (unsigned long long)(stats.allocated_bytes / mib), (unsigned long long)(stats.reserved_bytes / mib),
           (unsigned long long)stats.hits, (unsigned long long)stats.allocations);

    check(cushion_free(gpu, scratch));
    check(cushion_free(gpu, weights));
    check(cushion_device_destroy(gpu));
    puts("ok");
    return 0;
}

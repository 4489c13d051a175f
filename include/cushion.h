/*
 * Cushion: a caching allocator for CUDA memory that keeps programs alive when memory runs out.
 *
 *     cushion_device *gpu;
 *     void *memory;
 *     if (cushion_device_cuda(0, NULL, &gpu) != CUSHION_OK) { puts(cushion_last_error()); exit(1); }
 *     if (cushion_alloc(gpu, 1 << 20, stream, &memory) != CUSHION_OK) { puts(cushion_last_error()); exit(1); }
 *     ... kernels on `stream` ...
 *     cushion_free(gpu, memory);
 *     cushion_device_destroy(gpu);
 *
 * The header is for C99, and for C++11 and later. The C++ classes are at the end of this file. CUDA's headers are
 * not needed. A stream is a `void *`: CUstream and cudaStream_t convert to it, and NULL is the default stream. Device
 * memory is a `void *` too. docs/c-api.md says how to build and link.
 *
 * Every function may be called from any thread at any time. No function writes to standard output, throws, or ends
 * the program. A pointer argument may be NULL only if its function says so; otherwise the call returns
 * CUSHION_INVALID_ARGUMENT. The library reads and writes only results, texts and structs through pointers. It looks
 * up devices and device memory, so a wrong device or address is an error and not a crash.
 *
 * Streams are not checked, because CUDA does not check them. Destroy a stream only after its work is done and after
 * all memory that was allocated on it, or recorded for it, is freed. CUDA's per-thread default stream
 * (cudaStreamPerThread) is a different stream on every thread, and is refused. In code compiled so that NULL means
 * the per-thread stream, pass a stream of your own.
 */
#ifndef CUSHION_H
#define CUSHION_H

#include <stddef.h>
#include <stdint.h>

/* The version of this header. */
#define CUSHION_VERSION "0.1.0"

#ifdef __cplusplus
extern "C" {
#endif

/* The result of a call. A value never changes its meaning; later versions may add values. */
typedef enum cushion_status {
    /* The call succeeded. */
    CUSHION_OK = 0,
    /* An argument is invalid, such as NULL, a destroyed device, or a fraction outside 0 to 1. */
    CUSHION_INVALID_ARGUMENT = 1,
    /* Out of memory. Nothing has changed: free some memory and try again. */
    CUSHION_OUT_OF_MEMORY = 2,
    /* No live allocation of this device starts at the address: it was never allocated, or is already freed. */
    CUSHION_UNKNOWN_ADDRESS = 3,
    /* A conf string, or a CUSHION_* environment variable, is invalid. */
    CUSHION_INVALID_OPTION = 4,
    /* The machine does not have this GPU, or has no CUDA driver. */
    CUSHION_NO_DEVICE = 5,
    /* A call to the CUDA driver failed for a reason other than memory. */
    CUSHION_DRIVER_ERROR = 6,
    /* From cushion_device_destroy only: the device is destroyed, and its live allocations were freed with it. */
    CUSHION_STILL_LIVE = 7,
    /* A bug in Cushion. */
    CUSHION_INTERNAL = 8
} cushion_status;

/* A GPU, or a simulated device, with its cache. */
typedef struct cushion_device cushion_device;

/*
 * Returns the message of the last call that failed on this thread. For CUSHION_OUT_OF_MEMORY it has the requested
 * size, the memory of the device, and the cached bytes. The result is never NULL; it is empty if no call has failed.
 * The text is valid until the next failure on this thread, or until the thread ends.
 */
const char *cushion_last_error(void);

/* Returns the name of a status, such as "CUSHION_OK". Never NULL; the text is valid forever. */
const char *cushion_status_name(cushion_status status);

/* Returns the version of the library, in the form of CUSHION_VERSION. Never NULL; the text is valid forever. */
const char *cushion_version(void);

/* ---- devices ---- */

/*
 * Opens a GPU. `index` is CUDA's number for it, among the GPUs that this process can see.
 *
 * With `conf` NULL, all callers that open the same GPU this way share one cache, which exists until the process ends.
 * Its options are those of the CUSHION_* variables (docs/options.md). With a `conf`, such as
 * "expandable_segments:True,max_split_size_mb:256", or "" for the defaults, the device has a cache of its own and
 * reads no variable. The default policy is `paged`. "expandable_segments:True" selects PyTorch's expandable segments,
 * and "paged:False" PyTorch's classic allocator.
 *
 * `*out` is the device, or NULL on failure. Destroy it with cushion_device_destroy.
 */
cushion_status cushion_device_cuda(int index, const char *conf, cushion_device **out);

/*
 * Makes a simulated device of `capacity` bytes, for tests on machines without a GPU. It serves and refuses requests
 * as a GPU of that size does, but runs nothing: do not dereference its addresses. Any number is a valid stream.
 * `conf` is as above, and NULL means "". The device has a cache of its own.
 */
cushion_status cushion_device_simulated(size_t capacity, const char *conf, cushion_device **out);

/*
 * Destroys a device, after the running calls of other threads have returned. `device` may be NULL.
 *
 * If the device shares its cache (cushion_device_cuda with `conf` NULL), the cache and its live allocations stay for
 * the other handles, and the call returns CUSHION_OK. Another handle of the same GPU can still free them.
 *
 * If the device has a cache of its own, all its memory is released. The call returns CUSHION_OK if nothing was live.
 * Otherwise the live allocations are freed too, so that nothing leaks: the call returns CUSHION_STILL_LIVE, and
 * cushion_last_error says how many bytes were live. Wait for work on such memory before the call.
 *
 * The call returns CUSHION_INVALID_ARGUMENT if `device` is not a device. After any other result the handle is
 * invalid, and later calls refuse it.
 */
cushion_status cushion_device_destroy(cushion_device *device);

/* ---- memory ---- */

/*
 * Allocates `bytes` bytes, aligned to 512 bytes, for use on `stream`. The contents are undefined. Zero bytes give NULL
 * and CUSHION_OK. On failure `*out` is NULL and nothing has changed.
 */
cushion_status cushion_alloc(cushion_device *device, size_t bytes, void *stream, void **out);

/*
 * Frees memory of cushion_alloc. `pointer` may be NULL. The memory may be allocated again on its own stream at once;
 * stream order makes that safe. If other streams were recorded with cushion_record_stream, it is not allocated again
 * before their work on it is done. A pointer that is not live is refused, and nothing changes. Note that the address
 * of a freed pointer may soon belong to another allocation.
 *
 * After CUSHION_DRIVER_ERROR the memory is freed, and is held back until the driver answers again: do not free it a
 * second time.
 */
cushion_status cushion_free(cushion_device *device, void *pointer);

/*
 * Records that work on `stream`, which is not the stream of the allocation, uses the memory. After the free, the memory
 * is not allocated again before the work that is queued on `stream` by then is done. `pointer` may be NULL.
 */
cushion_status cushion_record_stream(cushion_device *device, void *pointer, void *stream);

/* Gives the usable bytes at `pointer`: the requested size, rounded up. 0 for NULL. */
cushion_status cushion_size_of(cushion_device *device, void *pointer, size_t *out);

/* Releases all cached memory to the device. Waits for work that still uses some of it. */
cushion_status cushion_empty_cache(cushion_device *device);

/* Limits the reserved memory to this fraction of the device's memory, from 0 to 1, from now on. */
cushion_status cushion_set_memory_fraction(cushion_device *device, double fraction);

/* ---- statistics ---- */

/* Gives the free bytes and all bytes of the device. Memory of other processes counts as used. */
cushion_status cushion_memory_info(cushion_device *device, size_t *free_bytes, size_t *total_bytes);

/*
 * The statistics of a device. A byte count is the present one; with _peak, it is the highest since
 * cushion_reset_peak_stats. New fields are added at the end only.
 */
typedef struct cushion_statistics {
    size_t struct_size;            /* set it to sizeof(cushion_statistics) first; the call sets the bytes it filled */
    uint64_t allocated_bytes;      /* allocated and not freed, in whole blocks */
    uint64_t allocated_bytes_peak;
    uint64_t reserved_bytes;       /* physical memory held from the device, live and cached */
    uint64_t reserved_bytes_peak;
    uint64_t requested_bytes;      /* allocated and not freed, as requested */
    uint64_t requested_bytes_peak;
    uint64_t active_bytes;         /* allocated, or freed but pending on another stream */
    uint64_t active_bytes_peak;
    uint64_t allocations;          /* number of allocations so far */
    uint64_t frees;                /* number of frees so far */
    uint64_t blocks;               /* number of blocks, live and free */
    uint64_t free_blocks;          /* number of free blocks */
    uint64_t cached_bytes;         /* reserved, but not in use */
    uint64_t largest_free_block;   /* its size in bytes */
    uint64_t hits;                 /* allocations served from reserved memory */
    uint64_t misses;               /* allocations that needed memory from the device */
    uint64_t retries;              /* allocations tried again after all cached memory was released */
    uint64_t ooms;                 /* allocations refused because memory ran out */
} cushion_statistics;

/*
 * Fills in the statistics. Set `out->struct_size` before the call. The call does not stop allocations on other
 * threads: each field is exact, but two fields may differ by one allocation.
 */
cushion_status cushion_stats(cushion_device *device, cushion_statistics *out);

/* Sets all peaks to the present values. */
cushion_status cushion_reset_peak_stats(cushion_device *device);

#ifdef __cplusplus
} /* extern "C" */

/*
 * C++11 and later. A function throws cushion::error where the C function would fail. Destructors do not throw.
 *
 *     auto gpu = cushion::device::cuda(0);
 *     cushion::buffer<float> a = gpu.alloc<float>(1 << 20, stream);
 *     kernel<<<grid, block, 0, stream>>>(a.get(), a.size());
 *     // `a` is freed here, in the order of its stream
 */

#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace cushion {

/* A failed call. what() is cushion_last_error(). */
class error : public std::runtime_error {
public:
    error(cushion_status status, const std::string &what) : std::runtime_error(what), status_(status) {}

    cushion_status status() const noexcept { return status_; }

private:
    cushion_status status_;
};

/* Out of memory. Free some memory and try again. */
class out_of_memory : public error {
public:
    explicit out_of_memory(const std::string &what) : error(CUSHION_OUT_OF_MEMORY, what) {}
};

/* Throws if the call failed. */
inline void check(cushion_status status) {
    if (status == CUSHION_OUT_OF_MEMORY) throw out_of_memory(cushion_last_error());
    if (status != CUSHION_OK) throw error(status, cushion_last_error());
}

struct memory_info {
    std::size_t free;
    std::size_t total;
};

/*
 * `size()` elements of T in device memory; may be empty. A buffer can be moved, not copied. Its destructor frees the
 * memory, in the order of the stream it was allocated on. The device exists at least until then.
 */
template <class T>
class buffer {
    static_assert(std::is_trivially_copyable<T>::value, "the memory of a device holds plain data only");

public:
    buffer() noexcept : pointer_(nullptr), size_(0) {}
    ~buffer() { reset(); }

    buffer(buffer &&other) noexcept
        : device_(std::move(other.device_)), pointer_(other.pointer_), size_(other.size_) {
        other.forget();
    }

    buffer &operator=(buffer &&other) noexcept {
        buffer(std::move(other)).swap(*this);
        return *this;
    }

    buffer(const buffer &) = delete;
    buffer &operator=(const buffer &) = delete;

    void swap(buffer &other) noexcept {
        device_.swap(other.device_);
        std::swap(pointer_, other.pointer_);
        std::swap(size_, other.size_);
    }

    /* Returns the address of the first element, or null if the buffer is empty. */
    T *get() const noexcept { return pointer_; }
    std::size_t size() const noexcept { return size_; }
    std::size_t size_bytes() const noexcept { return size_ * sizeof(T); }
    bool empty() const noexcept { return size_ == 0; }

    /* Records that work on another stream uses the buffer; see cushion_record_stream. */
    void record_stream(void *stream) const {
        if (pointer_ != nullptr) check(cushion_record_stream(device_.get(), pointer_, stream));
    }

    /* Frees the memory now. */
    void reset() noexcept {
        if (pointer_ != nullptr) (void)cushion_free(device_.get(), pointer_);
        forget();
    }

    /*
     * Returns the pointer and gives up ownership. The caller frees it with device::free or cushion_free, while the
     * device exists.
     */
    T *release() noexcept {
        T *pointer = pointer_;
        forget();
        return pointer;
    }

private:
    friend class device;

    buffer(std::shared_ptr<cushion_device> device, T *pointer, std::size_t size) noexcept
        : device_(std::move(device)), pointer_(pointer), size_(size) {}

    void forget() noexcept {
        pointer_ = nullptr;
        size_ = 0;
        device_.reset();
    }

    std::shared_ptr<cushion_device> device_;
    T *pointer_;
    std::size_t size_;
};

template <class T>
void swap(buffer<T> &one, buffer<T> &other) noexcept {
    one.swap(other);
}

/*
 * A GPU, or a simulated device, with its cache. Copies refer to the same device. The device is destroyed with its last
 * copy and its last buffer.
 */
class device {
public:
    /* See cushion_device_cuda. */
    static device cuda(int index = 0, const char *conf = nullptr) {
        cushion_device *made = nullptr;
        check(cushion_device_cuda(index, conf, &made));
        return device(made);
    }

    /* See cushion_device_simulated. */
    static device simulated(std::size_t capacity, const char *conf = nullptr) {
        cushion_device *made = nullptr;
        check(cushion_device_simulated(capacity, conf, &made));
        return device(made);
    }

    /* Allocates `count` elements for use on `stream`. The contents are undefined. */
    template <class T>
    buffer<T> alloc(std::size_t count, void *stream = nullptr) const {
        const std::size_t most = (std::numeric_limits<std::size_t>::max)();
        /* A size that overflows becomes the largest size, which every device refuses. */
        const std::size_t bytes = count > most / sizeof(T) ? most : count * sizeof(T);
        void *pointer = nullptr;
        check(cushion_alloc(get(), bytes, stream, &pointer));
        return buffer<T>(handle_, static_cast<T *>(pointer), count);
    }

    /* Frees a pointer of buffer::release(). */
    void free(void *pointer) const { check(cushion_free(get(), pointer)); }

    std::size_t size_of(void *pointer) const {
        std::size_t size = 0;
        check(cushion_size_of(get(), pointer, &size));
        return size;
    }

    void empty_cache() const { check(cushion_empty_cache(get())); }
    void set_memory_fraction(double fraction) const { check(cushion_set_memory_fraction(get(), fraction)); }
    void reset_peak_stats() const { check(cushion_reset_peak_stats(get())); }

    cushion::memory_info memory_info() const {
        cushion::memory_info info = {0, 0};
        check(cushion_memory_info(get(), &info.free, &info.total));
        return info;
    }

    cushion_statistics stats() const {
        cushion_statistics stats = cushion_statistics();
        stats.struct_size = sizeof(stats);
        check(cushion_stats(get(), &stats));
        return stats;
    }

    /* Returns the handle for the C functions. This object still owns it. */
    cushion_device *get() const noexcept { return handle_.get(); }

private:
    struct destroy {
        void operator()(cushion_device *device) const noexcept { (void)cushion_device_destroy(device); }
    };

    explicit device(cushion_device *made) : handle_(made, destroy()) {}

    std::shared_ptr<cushion_device> handle_;
};

} /* namespace cushion */

#endif /* __cplusplus */
#endif /* CUSHION_H */

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
 * For C99 and C++11 and later; C++ has classes of its own at the end of this file. CUDA's headers are not needed:
 * a stream is a `void *`, as a CUstream or a cudaStream_t converts to, NULL for the default stream, and so is the
 * memory of a device. docs/c-api.md says how to build and link.
 *
 * Every function may be called from any thread at any time. None writes to standard output, throws, or ends the
 * program; a pointer that is documented as an argument may be NULL where that is said, and is otherwise refused
 * with CUSHION_INVALID_ARGUMENT. Only results, texts and structs are ever read or written through a pointer:
 * devices and memory of a device are looked up, so that a wrong one is an error and not a crash.
 *
 * A stream is not: CUDA does not check one. Destroy a stream only once its work is done and all memory that was
 * allocated on it, or noted for it, is freed. CUDA's per-thread default stream (cudaStreamPerThread) is another stream
 * on every thread and is refused; in code compiled so that NULL means that one, name a stream of your own.
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

/* What a call came to. The values never change their meaning; later versions may add others. */
typedef enum cushion_status {
    /* Done. */
    CUSHION_OK = 0,
    /* An argument is no good: a NULL, a device that was destroyed, a fraction that is not one. */
    CUSHION_INVALID_ARGUMENT = 1,
    /* There is no memory for it. Nothing is lost: free some, and try again. */
    CUSHION_OUT_OF_MEMORY = 2,
    /* No live allocation of this device starts there: it was never handed out, or was freed before. */
    CUSHION_UNKNOWN_ADDRESS = 3,
    /* A conf string, or a CUSHION_* variable of the environment, is no good. */
    CUSHION_INVALID_OPTION = 4,
    /* There is no such GPU here, or no CUDA driver. */
    CUSHION_NO_DEVICE = 5,
    /* A call to the CUDA driver failed for another reason than memory. */
    CUSHION_DRIVER_ERROR = 6,
    /* From cushion_device_destroy only: it is destroyed, and what was still live went with it. */
    CUSHION_STILL_LIVE = 7,
    /* A bug in Cushion. */
    CUSHION_INTERNAL = 8
} cushion_status;

/* A GPU, or a simulated one, with its cache. */
typedef struct cushion_device cushion_device;

/*
 * Why the last call of this thread failed that did, in words for a person: for CUSHION_OUT_OF_MEMORY with what was
 * asked for, what the device has and what is cached. Never NULL; empty if no call has failed. The text stays until
 * the next call of this thread that fails, or the thread's end.
 */
const char *cushion_last_error(void);

/* The name of a status, as in "CUSHION_OK". Never NULL; it stays for good. */
const char *cushion_status_name(cushion_status status);

/* The version of the library, as in CUSHION_VERSION. Never NULL; it stays for good. */
const char *cushion_version(void);

/* ---- devices ---- */

/*
 * A GPU, as CUDA numbers those that this process can see.
 *
 * With `conf` NULL, everybody who asks so for the same GPU shares one cache, which stays for the life of the
 * process; its options are those of the CUSHION_* variables (docs/options.md). With a `conf`, as in
 * "expandable_segments:True,max_split_size_mb:256", or "" for the defaults, the device has a cache of its own and
 * looks at no variable. Memory is laid out with the least waste, unless "expandable_segments:True" or "paged:False"
 * asks for it as PyTorch has it.
 *
 * `*out` is the device, or NULL on failure. Destroy it with cushion_device_destroy.
 */
cushion_status cushion_device_cuda(int index, const char *conf, cushion_device **out);

/*
 * A simulated device of `capacity` bytes, for tests on machines without a GPU. It serves and refuses as a GPU of
 * that size does, and runs nothing: nobody may follow its addresses. Any number is a stream of it. `conf` is as
 * above; NULL is as "". Its cache is its own.
 */
cushion_status cushion_device_simulated(size_t capacity, const char *conf, cushion_device **out);

/*
 * Gives a device up, after the calls under way on other threads. NULL is no device, and fine.
 *
 * One that shares its cache (cushion_device_cuda with `conf` NULL): the cache and what is live in it stay for the
 * others, and CUSHION_OK is returned. Another handle of the same GPU can still free it.
 *
 * One with a cache of its own: all its memory goes back to the device. CUSHION_OK if nothing was live. If
 * something was, that went too, so that nothing leaks: CUSHION_STILL_LIVE is returned, and cushion_last_error says
 * how much. Wait for work on such memory before.
 *
 * Whatever is returned, unless it is CUSHION_INVALID_ARGUMENT for what was no device, `device` is none any more;
 * later uses are refused.
 */
cushion_status cushion_device_destroy(cushion_device *device);

/* ---- memory ---- */

/*
 * Memory for `bytes` bytes, ready to use on `stream`, aligned to 512 bytes; what is in it is anything. Zero bytes
 * give NULL and CUSHION_OK. On failure `*out` is NULL, and nothing is lost.
 */
cushion_status cushion_alloc(cushion_device *device, size_t bytes, void *stream, void **out);

/*
 * Gives back what cushion_alloc gave; NULL is fine. The memory is handed out again on its own stream at once,
 * which that stream's order makes safe, and not before every stream noted with cushion_record_stream is done with
 * it. A pointer that is not live is refused, and nothing changes: but mind that a freed one may soon be another
 * allocation's.
 *
 * With CUSHION_DRIVER_ERROR the memory was taken back, and is kept until the driver answers again: do not free it
 * a second time.
 */
cushion_status cushion_free(cushion_device *device, void *pointer);

/*
 * Notes that work on `stream`, another than it was allocated on, uses the memory: once freed, it is not handed out
 * again before the work queued there by then is done. NULL as `pointer` is fine.
 */
cushion_status cushion_record_stream(cushion_device *device, void *pointer, void *stream);

/* How many bytes may be used at `pointer`: as many as were asked for, or somewhat more. 0 for NULL. */
cushion_status cushion_size_of(cushion_device *device, void *pointer, size_t *out);

/* Gives everything cached back to the device, for others to use; waits for work that still uses some of it. */
cushion_status cushion_empty_cache(cushion_device *device);

/* Refuses from now on to hold more than this share of the device's memory, from 0 to 1. */
cushion_status cushion_set_memory_fraction(cushion_device *device, double fraction);

/* ---- figures ---- */

/* What the device has free, and has in all, in bytes; other processes are counted. */
cushion_status cushion_memory_info(cushion_device *device, size_t *free_bytes, size_t *total_bytes);

/*
 * The figures of a device. Bytes are those now, and with _peak the most since cushion_reset_peak_stats. New figures
 * are added at the end only.
 */
typedef struct cushion_statistics {
    size_t struct_size;            /* set to sizeof(cushion_statistics) before the call; after it, the bytes filled */
    uint64_t allocated_bytes;      /* handed out and not given back, in whole blocks */
    uint64_t allocated_bytes_peak;
    uint64_t reserved_bytes;       /* held from the device, in use and cached */
    uint64_t reserved_bytes_peak;
    uint64_t requested_bytes;      /* handed out, as they were asked for */
    uint64_t requested_bytes_peak;
    uint64_t active_bytes;         /* handed out, or given back and waiting for another stream */
    uint64_t active_bytes_peak;
    uint64_t allocations;          /* how many so far */
    uint64_t frees;                /* how many so far */
    uint64_t blocks;               /* how many there are, in use and free */
    uint64_t free_blocks;          /* how many of them are free */
    uint64_t cached_bytes;         /* held, and in nobody's use */
    uint64_t largest_free_block;   /* in bytes */
    uint64_t hits;                 /* allocations served from memory already held */
    uint64_t misses;               /* allocations that needed memory from the device */
    uint64_t retries;              /* allocations tried again after everything cached was given back */
    uint64_t ooms;                 /* allocations refused for want of memory */
} cushion_statistics;

/*
 * Fills in the figures; `out->struct_size` has to be set. Stops no allocation on another thread: each figure is true,
 * and two of them may be an allocation apart.
 */
cushion_status cushion_stats(cushion_device *device, cushion_statistics *out);

/* Peaks start again from what is there now. */
cushion_status cushion_reset_peak_stats(cushion_device *device);

#ifdef __cplusplus
} /* extern "C" */

/*
 * For C++11 and later. The functions throw a cushion::error where those above fail; no destructor does.
 *
 *     auto gpu = cushion::device::cuda(0);
 *     cushion::buffer<float> a = gpu.alloc<float>(1 << 20, stream);
 *     kernel<<<grid, block, 0, stream>>>(a.get(), a.size());
 *     // freed here, in the order of its stream
 */

#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace cushion {

/* A call that failed: what() is cushion_last_error(). */
class error : public std::runtime_error {
public:
    error(cushion_status status, const std::string &what) : std::runtime_error(what), status_(status) {}

    cushion_status status() const noexcept { return status_; }

private:
    cushion_status status_;
};

/* There is no memory for it. Free some, and try again. */
class out_of_memory : public error {
public:
    explicit out_of_memory(const std::string &what) : error(CUSHION_OUT_OF_MEMORY, what) {}
};

/* Throws what a call came to, unless it went well. */
inline void check(cushion_status status) {
    if (status == CUSHION_OUT_OF_MEMORY) throw out_of_memory(cushion_last_error());
    if (status != CUSHION_OK) throw error(status, cushion_last_error());
}

struct memory_info {
    std::size_t free;
    std::size_t total;
};

/*
 * `size()` elements of T in the memory of a device, or none. Moved, not copied. Its destructor gives the memory
 * back, in the order of the stream it was allocated on; the device stays until then.
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

    /* Where it begins in the device's memory; null if it is empty. */
    T *get() const noexcept { return pointer_; }
    std::size_t size() const noexcept { return size_; }
    std::size_t size_bytes() const noexcept { return size_ * sizeof(T); }
    bool empty() const noexcept { return size_ == 0; }

    /* Notes that work on another stream than its own uses it; see cushion_record_stream. */
    void record_stream(void *stream) const {
        if (pointer_ != nullptr) check(cushion_record_stream(device_.get(), pointer_, stream));
    }

    /* Gives the memory back now. */
    void reset() noexcept {
        if (pointer_ != nullptr) (void)cushion_free(device_.get(), pointer_);
        forget();
    }

    /*
     * Gives the pointer away: the caller frees it, with device::free or cushion_free, while the device is there.
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
 * A GPU, or a simulated one, with its cache. Copies are the same device, which is destroyed with the last of them
 * and of its buffers.
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

    /* `count` elements, of whatever is there, ready to use on `stream`. */
    template <class T>
    buffer<T> alloc(std::size_t count, void *stream = nullptr) const {
        const std::size_t most = (std::numeric_limits<std::size_t>::max)();
        /* More than can be counted is refused with the rest that no device has. */
        const std::size_t bytes = count > most / sizeof(T) ? most : count * sizeof(T);
        void *pointer = nullptr;
        check(cushion_alloc(get(), bytes, stream, &pointer));
        return buffer<T>(handle_, static_cast<T *>(pointer), count);
    }

    /* Frees what a buffer released. */
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

    /* For the functions of C; it stays this object's. */
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

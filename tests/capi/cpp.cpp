// Tests the classes of cushion.h from C++: `cpp [cuda|simulated]`.
#include <thread>
#include <vector>

#include "support.h"

using cushion::buffer;
using cushion::device;

static const std::size_t MIB = std::size_t(1) << 20;

static_assert(!std::is_copy_constructible<buffer<int>>::value, "two buffers would free the same memory");
static_assert(!std::is_copy_assignable<buffer<int>>::value, "two buffers would free the same memory");
static_assert(std::is_nothrow_move_constructible<buffer<int>>::value, "containers move buffers");
static_assert(std::is_nothrow_move_assignable<buffer<int>>::value, "containers move buffers");
static_assert(std::is_nothrow_destructible<buffer<int>>::value, "destructors do not throw");
static_assert(std::is_copy_constructible<device>::value, "a device is a handle");
static_assert(std::is_nothrow_destructible<device>::value, "destructors do not throw");

// Makes the device under test, with a cache of its own.
static device make(const char *conf = "") {
    return on_gpu ? device::cuda(0, conf) : device::simulated(1024 * MIB, conf);
}

static void buffers_free_what_they_hold() {
    device gpu = make();
    {
        buffer<float> a = gpu.alloc<float>(1000);
        CHECK(a.get() != nullptr && a.size() == 1000 && a.size_bytes() == 4000 && !a.empty());
        CHECK(gpu.size_of(a.get()) == 4096);
        CHECK(gpu.stats().allocated_bytes == 4096);
    }
    CHECK(gpu.stats().allocated_bytes == 0);
    buffer<double> b = gpu.alloc<double>(10);
    b.reset();
    CHECK(b.get() == nullptr && b.empty() && gpu.stats().allocated_bytes == 0);
    b.reset();

    buffer<double> none = gpu.alloc<double>(0);
    CHECK(none.get() == nullptr && none.size() == 0 && gpu.stats().allocated_bytes == 0);
    none.record_stream(nullptr);
}

static void buffers_move() {
    device gpu = make();
    buffer<int> a = gpu.alloc<int>(100), b = gpu.alloc<int>(200);
    int *first = a.get(), *second = b.get();
    buffer<int> c(std::move(a));
    CHECK(c.get() == first && c.size() == 100);
    swap(b, c);
    CHECK(b.get() == first && c.get() == second && c.size() == 200);
    CHECK(gpu.stats().frees == 0);
    c = std::move(b);
    CHECK(c.get() == first && gpu.stats().frees == 1);
    std::vector<buffer<int>> many;
    for (int i = 0; i < 50; i++) many.push_back(gpu.alloc<int>(100));
    CHECK(gpu.stats().allocated_bytes == 51 * 512);
    many.clear();
    int *released = c.release();
    CHECK(released == first && c.empty() && gpu.stats().allocated_bytes == 512);
    gpu.free(released);
    CHECK(gpu.stats().allocated_bytes == 0);
}

static void a_buffer_keeps_its_device_alive() {
    buffer<char> kept;
    cushion_device *handle;
    {
        device gpu = make();
        device same = gpu;
        kept = same.alloc<char>(1000);
        handle = gpu.get();
    }
    std::size_t size = 0;
    CHECK_STATUS(CUSHION_OK, cushion_size_of(handle, kept.get(), &size));
    CHECK(size == 1024);
    kept.reset();
    CHECK_STATUS(CUSHION_INVALID_ARGUMENT, cushion_empty_cache(handle));
}

template <class Call>
static cushion_status status_of(Call call) {
    try {
        call();
    } catch (const cushion::error &failure) {
        CHECK(std::string(failure.what()) == cushion_last_error());
        return failure.status();
    }
    return CUSHION_OK;
}

static void failures_are_thrown() {
    device gpu = make();
    CHECK(status_of([] { device::simulated(MIB, "no_such_option:1"); }) == CUSHION_INVALID_OPTION);
    CHECK(status_of([] { device::cuda(-1); }) == CUSHION_NO_DEVICE);
    CHECK(status_of([&] { gpu.free(&gpu); }) == CUSHION_UNKNOWN_ADDRESS);
    CHECK(status_of([&] { gpu.size_of(&gpu); }) == CUSHION_UNKNOWN_ADDRESS);
    CHECK(status_of([&] { gpu.set_memory_fraction(2); }) == CUSHION_INVALID_ARGUMENT);
    device moved = std::move(gpu);
    CHECK(status_of([&] { gpu.empty_cache(); }) == CUSHION_INVALID_ARGUMENT);
    bool thrown = false;
    try {
        moved.alloc<char>(moved.memory_info().total + 1);
    } catch (const std::runtime_error &failure) {
        thrown = dynamic_cast<const cushion::out_of_memory *>(&failure) != nullptr;
    }
    CHECK(thrown);
    CHECK(status_of([&] { moved.alloc<double>(~std::size_t(0) / 4); }) == CUSHION_OUT_OF_MEMORY);
    CHECK(moved.stats().ooms == 2);
}

static void recovery_from_out_of_memory() {
    device gpu = make();
    const std::size_t part = gpu.memory_info().total / 64;
    gpu.set_memory_fraction(1.0 / 16);
    std::vector<buffer<char>> held;
    try {
        for (;;) held.push_back(gpu.alloc<char>(part));
    } catch (const cushion::out_of_memory &) {
        CHECK(held.size() == 3 || held.size() == 4);
        held.clear();
    }
    CHECK(gpu.stats().reserved_bytes_peak <= 4 * part);
    CHECK(gpu.alloc<char>(2 * part).size() == 2 * part);
    gpu.empty_cache();
    CHECK(gpu.stats().reserved_bytes == 0);
    gpu.reset_peak_stats();
    CHECK(gpu.stats().reserved_bytes_peak == 0);
}

static void threads() {
    device gpu = make();
    std::vector<std::thread> running;
    for (int self = 0; self < 8; self++) {
        // Each thread has its own copy of the device.
        running.emplace_back([gpu, self] {
            std::vector<buffer<char>> held(16);
            for (unsigned i = 0; i < 1000; i++) {
                held[i % 16] = gpu.alloc<char>(1 + (i * 7919 + unsigned(self)) % 65536);
                CHECK(gpu.size_of(held[i % 16].get()) >= held[i % 16].size());
                bool own = false;
                try {
                    gpu.free(reinterpret_cast<void *>(std::uintptr_t(self + 1)));
                } catch (const cushion::error &failure) {
                    own = strstr(failure.what(), ("0x" + std::to_string(self + 1) + ":").c_str()) != nullptr;
                }
                CHECK(own);
            }
        });
    }
    for (std::thread &thread : running) thread.join();
    const cushion_statistics stats = gpu.stats();
    CHECK(stats.allocations == 8000 && stats.frees == 8000 && stats.allocated_bytes == 0);
}

static void streams() {
    driver cuda;
    void *one = reinterpret_cast<void *>(1), *two = reinterpret_cast<void *>(2);
    if (on_gpu) {
        cuda = driver_open();
        CHECK(cuda.stream_create(&one, 1) == 0);
        CHECK(cuda.stream_create(&two, 1) == 0);
    }
    {
        device gpu = make();
        buffer<float> a = gpu.alloc<float>(1000, one);
        a.record_stream(two);
        a.reset();
        gpu.empty_cache();
        CHECK(gpu.stats().active_bytes == 0 && gpu.stats().reserved_bytes == 0);
    }
    if (on_gpu) {
        CHECK(cuda.stream_destroy(one) == 0);
        CHECK(cuda.stream_destroy(two) == 0);
        driver_close(&cuda);
    }
}

static void memory_can_be_written_and_read() {
    driver cuda = driver_open();
    void *stream = nullptr;
    CHECK(cuda.stream_create(&stream, 1) == 0);
    for (const char *conf : {"", "expandable_segments:True", "paged:False"}) {
        device gpu = make(conf);
        buffer<float> a = gpu.alloc<float>(MIB, stream), b = gpu.alloc<float>(100, stream);
        check_real(&cuda, a.get(), a.size_bytes(), 0x5a, stream);
        check_real(&cuda, b.get(), b.size_bytes(), 0xa5, stream);
    }
    CHECK(cuda.stream_destroy(stream) == 0);
    driver_close(&cuda);
}

int main(int count, char **arguments) {
    begin("capi_cpp", count, arguments);
    RUN(buffers_free_what_they_hold);
    RUN(buffers_move);
    RUN(a_buffer_keeps_its_device_alive);
    RUN(failures_are_thrown);
    RUN(recovery_from_out_of_memory);
    RUN(threads);
    RUN(streams);
    if (on_gpu) RUN(memory_can_be_written_and_read);
    end();
    return 0;
}

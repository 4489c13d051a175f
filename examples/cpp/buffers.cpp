// Allocates buffers from C++: c++ -std=c++11 buffers.cpp $(pkg-config --cflags --libs cushion) && ./a.out
//
// On a machine without a GPU it uses a simulated device.
#include <iostream>
#include <vector>

#include <cushion.h>

static cushion::device open_device() {
    try {
        return cushion::device::cuda(0);
    } catch (const cushion::error &failure) {
        if (failure.status() != CUSHION_NO_DEVICE) throw;
        std::cout << "no GPU (" << failure.what() << "): using a simulated device of 1 GiB\n";
        return cushion::device::simulated(std::size_t(1) << 30);
    }
}

// Returns a batch of `count` elements, halved until it fits.
static cushion::buffer<float> batch_that_fits(const cushion::device &gpu, std::size_t count, void *stream) {
    for (;;) {
        try {
            return gpu.alloc<float>(count, stream);
        } catch (const cushion::out_of_memory &) {
            if (count < 1024) throw;
            std::cout << count << " elements do not fit\n";
            count /= 2;
        }
    }
}

int main() {
    try {
        cushion::device gpu = open_device();
        gpu.set_memory_fraction(0.5);
        void *stream = nullptr; // a cudaStream_t or a CUstream; null is the default stream

        cushion::buffer<float> batch = batch_that_fits(gpu, gpu.memory_info().total / sizeof(float), stream);
        std::cout << batch.size() << " elements fit, at " << static_cast<void *>(batch.get()) << "\n";
        // kernel<<<grid, block, 0, stream>>>(batch.get(), batch.size());

        batch.reset();
        for (int step = 0; step < 100; step++) {
            cushion::buffer<double> scratch = gpu.alloc<double>(100000, stream);
            // ... freed at the end of each iteration, and served from the cache in the next
        }
        const cushion_statistics stats = gpu.stats();
        std::cout << stats.hits << " of " << stats.allocations << " allocations served from the cache\nok\n";
    } catch (const cushion::error &failure) {
        std::cerr << cushion_status_name(failure.status()) << ": " << failure.what() << "\n";
        return 1;
    }
    return 0;
}

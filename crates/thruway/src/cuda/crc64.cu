// CRC-64/NVME of many pieces of a GPU's memory at once: the kernel of crc64.rs. scripts/build-ptx makes crc64.ptx of it.
//
// A CRC is the remainder of the bytes, taken as one long polynomial, and the sum of polynomials is exclusive or. So a block of
// threads deals the 8-byte words of a piece out as cards, such that neighbouring threads read neighbouring words:
//
//     words     0 0 w0 w1 | w2 w3 w4 w5 | … | … wn-1 · tail      (zeros in front change nothing)
//     threads   0 1  2  3 |  0  1  2  3 |     0 1  2  3
//
// Each thread takes what it has times x to the power of a row's bits, adds its next word, and so on: eight lookups a word, as for
// words that follow one another, only that the tables are for a row instead of a word. In the end it multiplies what it has by x to
// the power of the bits from its last word on, and all add up theirs.
//
// Rate, by estimate and not measured: lookups of 8 bytes at random meet about 3.1 times in a bank of shared memory, so an H200's
// multiprocessor does a byte for each of 32 threads in some 6.2 cycles; 132 of them at 1.7 GHz make 1.1 TB/s, twenty times what PCIe
// 5.0 brings. Making the tables takes a launch some 0.1 ms.

typedef unsigned long long u64;

enum { THREADS = 256 }; // As many as there are values of a byte.

#ifdef __CUDA__
#define KERNEL extern "C" __attribute__((global, launch_bounds(THREADS)))
#define SHARED __attribute__((shared))
#define DEVICE __attribute__((device))
#define THREAD __nvvm_read_ptx_sreg_tid_x()
#define BLOCK __nvvm_read_ptx_sreg_ctaid_x()
#define BLOCKS __nvvm_read_ptx_sreg_nctaid_x()
#define SYNCHRONIZE() __syncthreads()
#endif

// What is to be summed. The remainder is zero before.
struct Piece {
    u64 address, bytes, remainder;
};

// Terms stand in the order of the CRC's bits: that of x^0 is the highest.
constexpr u64 POLYNOMIAL = 0x9a6c9329ac4bc9b5, ONE = 1ull << 63;

// The product of two polynomials, modulo the CRC's.
DEVICE constexpr u64 multiplied(u64 one, u64 other) {
    u64 product = 0;
    for (; one; one <<= 1) {
        product ^= one & ONE ? other : 0;
        other = (other >> 1) ^ (other & 1 ? POLYNOMIAL : 0); // Times x.
    }
    return product;
}

// x to the power of so many words' bits.
DEVICE constexpr u64 power_of_x(unsigned words) {
    u64 power = ONE, square = POLYNOMIAL; // x^64, modulo the polynomial, is what it has beside x^64.
    for (; words; words >>= 1) {
        power = words & 1 ? multiplied(power, square) : power;
        square = multiplied(square, square);
    }
    return power;
}

constexpr u64 WORD = power_of_x(1), ROW = power_of_x(THREADS);

// The bytes from `from` on and before `to`, at most eight, the last of them the highest. Nothing else is touched.
DEVICE static u64 bytes_of(u64 from, u64 to) {
    u64 word = 0;
    for (; from < to; from++)
        word = word >> 8 | (u64) * (const unsigned char *)from << 56;
    return word;
}

KERNEL void thruway_crc64(Piece *pieces, u64 count) {
    SHARED u64 table[8][THREADS];
    const unsigned thread = THREAD;
    for (unsigned byte = 0; byte < 8; byte++)
        table[byte][thread] = multiplied((u64)thread << 8 * byte, ROW);
    const u64 power = power_of_x(THREADS - thread);
    SYNCHRONIZE();

    for (u64 number = BLOCK; number < count; number += BLOCKS) {
        const u64 start = pieces[number].address, end = start + pieces[number].bytes;
        // Aligned words lie from `first` to `last`; of the first one the piece may have a part.
        const u64 first = start & ~7ull, last = end & ~7ull, words = (last - first) / 8;
        u64 sum = 0;
        // The last word is the last thread's.
        for (u64 word = (thread + words) % THREADS; word < words; word += THREADS) {
            u64 next = 0;
            for (unsigned byte = 0; byte < 8; byte++)
                next ^= table[byte][sum >> 8 * byte & 0xff];
            const u64 at = first + 8 * word;
            sum = next ^ (at < start ? bytes_of(start, at + 8) : *(const u64 *)at);
        }
        sum = multiplied(sum, power);
        if (const unsigned tail_bits = 8 * (end - last)) {
            sum = multiplied(sum, ONE >> tail_bits);
            sum ^= thread == 0 ? multiplied(bytes_of(start > last ? start : last, end), WORD) : 0;
        }
        if (sum)
            __atomic_fetch_xor(&pieces[number].remainder, sum, __ATOMIC_RELAXED);
    }
}

// The GPU's kernel, run by the processor: one thread after another, which is as good where nothing but tables is shared.
//
// On standard input: numbers of 64 bits, the blocks, the pieces, for each its start and its length, then the bytes that they are of.
// On standard output: the remainders.

#include <cstdio>
#include <vector>

static unsigned thread_now, block_now, blocks_now;

#define KERNEL extern "C"
#define SHARED static
#define DEVICE
#define THREAD thread_now
#define BLOCK block_now
#define BLOCKS blocks_now
#define SYNCHRONIZE()

#include "../../src/cuda/crc64.cu"

static u64 number() {
    u64 value = 0;
    return fread(&value, sizeof value, 1, stdin) == 1 ? value : 0;
}

int main() {
    blocks_now = number();
    std::vector<Piece> pieces(number());
    for (Piece &piece : pieces)
        piece = {number(), number(), 0};
    std::vector<u64> words;
    for (u64 word; fread(&word, sizeof word, 1, stdin) == 1;)
        words.push_back(word);
    for (Piece &piece : pieces)
        piece.address += (u64)words.data();
    // First each thread makes its part of the tables, without a piece to sum; then all of them are there, as behind the barrier.
    for (int ready = 0; ready < 2; ready++)
        for (block_now = 0; block_now < blocks_now; block_now++)
            for (thread_now = 0; thread_now < THREADS; thread_now++)
                thruway_crc64(pieces.data(), ready ? pieces.size() : 0);
    for (Piece &piece : pieces)
        fwrite(&piece.remainder, sizeof piece.remainder, 1, stdout);
}

/* BLAKE2b and SHA-256 over many short texts. */

/* ---- BLAKE2b (RFC 7693), without a key, of four texts at a time: one in each lane of a vector */

#define BLOCK 128
#define STATE_BYTES 64
#define LANES 4

typedef uint64_t Lanes __attribute__((vector_size(8 * LANES)));

static const uint64_t BLAKE_IV[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

static const unsigned char SIGMA[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

#define ROTATE(x, n) ((x) >> (n) | (x) << (64 - (n)))
#define MIX(a, b, c, d, x, y)           \
    a += b + (x), d = ROTATE(d ^ a, 32); \
    c += d, b = ROTATE(b ^ c, 24);       \
    a += b + (y), d = ROTATE(d ^ a, 16); \
    c += d, b = ROTATE(b ^ c, 63);

static inline __attribute__((always_inline)) void blake_compress(
    Lanes h[8], Bytes const blocks[LANES], const Lanes *count, const Lanes *is_last)
{
    uint64_t words[16][LANES];
    Lanes m[16], v[16];
    for (int n = 0; n < 16; n++)
        for (int lane = 0; lane < LANES; lane++)
            memcpy(&words[n][lane], blocks[lane] + 8 * n, 8);
    memcpy(m, words, sizeof m);
    for (int n = 0; n < 8; n++) {
        v[n] = h[n];
        v[n + 8] = BLAKE_IV[n] - (Lanes){0};
    }
    v[12] ^= *count;
    v[14] ^= *is_last;
#pragma GCC unroll 12
    for (int round = 0; round < 12; round++) {
        const unsigned char *s = SIGMA[round];
        MIX(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]])
        MIX(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]])
        MIX(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]])
        MIX(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]])
        MIX(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]])
        MIX(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]])
        MIX(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]])
        MIX(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]])
    }
    for (int n = 0; n < 8; n++)
        h[n] ^= v[n] ^ v[n + 8];
}

/* Texts of different lengths end in different blocks: a lane that is done keeps what it has. */
static inline __attribute__((always_inline)) void blake_four(
    Bytes const texts[LANES], const size_t sizes[LANES], size_t digest_bytes, Lanes h[8])
{
    static const unsigned char nothing[BLOCK];
    unsigned char tails[LANES][BLOCK] = {{0}};
    size_t lasts[LANES], last = 0;
    for (int n = 0; n < 8; n++)
        h[n] = BLAKE_IV[n] - (Lanes){0};
    h[0] ^= 0x01010000 ^ digest_bytes;
    for (int lane = 0; lane < LANES; lane++) {
        lasts[lane] = sizes[lane] ? (sizes[lane] - 1) / BLOCK : 0;
        size_t start = lasts[lane] * BLOCK;
        if (sizes[lane])
            memcpy(tails[lane], texts[lane] + start, sizes[lane] - start);
        last = lasts[lane] > last ? lasts[lane] : last;
    }
    for (size_t at = 0; at <= last; at++) {
        Bytes blocks[LANES];
        Lanes count = {0}, is_last = {0}, is_on = {0}, before[8];
        for (int lane = 0; lane < LANES; lane++) {
            int is_end = at == lasts[lane];
            blocks[lane] = at < lasts[lane] ? texts[lane] + at * BLOCK : is_end ? tails[lane] : nothing;
            count[lane] = is_end ? sizes[lane] : (at + 1) * BLOCK;
            is_last[lane] = is_end ? UINT64_MAX : 0;
            is_on[lane] = at <= lasts[lane] ? UINT64_MAX : 0;
        }
        memcpy(before, h, sizeof before);
        blake_compress(h, blocks, &count, &is_last);
        for (int n = 0; n < 8; n++)
            h[n] = (h[n] & is_on) | (before[n] & ~is_on);
    }
}

typedef void BlakeFour(Bytes const texts[LANES], const size_t sizes[LANES], size_t digest_bytes, uint64_t h[8][LANES]);

#define BLAKE_FOUR(name)                                                                                            \
    static void name(Bytes const texts[LANES], const size_t sizes[LANES], size_t digest_bytes, uint64_t h[8][LANES]) \
    {                                                                                                               \
        Lanes lanes[8];                                                                                             \
        blake_four(texts, sizes, digest_bytes, lanes);                                                              \
        memcpy(h, lanes, sizeof lanes);                                                                             \
    }

BLAKE_FOUR(blake_plain)
#if defined(__x86_64__)
__attribute__((target("avx2"))) BLAKE_FOUR(blake_avx2)
__attribute__((target("avx2,avx512f,avx512vl"))) BLAKE_FOUR(blake_avx512)
#endif

static BlakeFour *blake_of_this_machine(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512vl"))
        return blake_avx512;
    if (__builtin_cpu_supports("avx2"))
        return blake_avx2;
#endif
    return blake_plain;
}

/* ---- SHA-256 (FIPS 180-4), of eight texts at a time. The processor's own instructions take as long for one as these take
for each of eight, and many processors lack them. */

#define SHA_BLOCK 64
#define SHA_BYTES 32
#define SHA_LANES 8

typedef uint32_t ShaLanes __attribute__((vector_size(4 * SHA_LANES)));

static const uint32_t SHA_K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static const uint32_t SHA_IV[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

#define TURN(x, n) ((x) >> (n) | (x) << (32 - (n)))

static inline __attribute__((always_inline)) void sha_compress(ShaLanes h[8], Bytes const blocks[SHA_LANES])
{
    uint32_t words[16][SHA_LANES];
    ShaLanes w[16], a = h[0], b = h[1], c = h[2], d = h[3], e = h[4], f = h[5], g = h[6], last = h[7];
    for (int n = 0; n < 16; n++)
        for (int lane = 0; lane < SHA_LANES; lane++) {
            uint32_t word;
            memcpy(&word, blocks[lane] + 4 * n, 4);
            words[n][lane] = __builtin_bswap32(word);
        }
    memcpy(w, words, sizeof w);
#pragma GCC unroll 64
    for (int n = 0; n < 64; n++) {
        if (n >= 16) {
            ShaLanes early = w[(n + 1) & 15], late = w[(n + 14) & 15];
            w[n & 15] += w[(n + 9) & 15] + (TURN(early, 7) ^ TURN(early, 18) ^ early >> 3)
                         + (TURN(late, 17) ^ TURN(late, 19) ^ late >> 10);
        }
        ShaLanes one = last + (TURN(e, 6) ^ TURN(e, 11) ^ TURN(e, 25)) + ((e & f) ^ (~e & g)) + SHA_K[n] + w[n & 15];
        ShaLanes two = (TURN(a, 2) ^ TURN(a, 13) ^ TURN(a, 22)) + ((a & b) | (c & (a | b)));
        last = g, g = f, f = e, e = d + one;
        d = c, c = b, b = a, a = one + two;
    }
    h[0] += a, h[1] += b, h[2] += c, h[3] += d, h[4] += e, h[5] += f, h[6] += g, h[7] += last;
}

/* As with BLAKE2b, a lane that is done keeps what it has. */
static inline __attribute__((always_inline)) void sha_eight(
    Bytes const texts[SHA_LANES], const size_t sizes[SHA_LANES], unsigned char *digests)
{
    unsigned char tails[SHA_LANES][2 * SHA_BLOCK] = {{0}};
    size_t whole[SHA_LANES], counts[SHA_LANES], most = 0;
    ShaLanes h[8];
    for (int n = 0; n < 8; n++)
        h[n] = SHA_IV[n] - (ShaLanes){0};
    for (int lane = 0; lane < SHA_LANES; lane++) {
        size_t left = sizes[lane] % SHA_BLOCK, tail_blocks = left + 9 <= SHA_BLOCK ? 1 : 2;
        uint64_t bits = __builtin_bswap64((uint64_t)sizes[lane] * 8);
        whole[lane] = sizes[lane] / SHA_BLOCK;
        counts[lane] = whole[lane] + tail_blocks;
        if (left)
            memcpy(tails[lane], texts[lane] + sizes[lane] - left, left);
        tails[lane][left] = 0x80;
        memcpy(tails[lane] + tail_blocks * SHA_BLOCK - 8, &bits, 8);
        most = counts[lane] > most ? counts[lane] : most;
    }
    for (size_t at = 0; at < most; at++) {
        Bytes blocks[SHA_LANES];
        ShaLanes is_on = {0}, before[8];
        for (int lane = 0; lane < SHA_LANES; lane++) {
            int is_tail = at >= whole[lane];
            is_on[lane] = at < counts[lane] ? UINT32_MAX : 0;
            blocks[lane] = !is_tail ? texts[lane] + at * SHA_BLOCK
                                    : tails[lane] + (is_on[lane] ? at - whole[lane] : 0) * SHA_BLOCK;
        }
        memcpy(before, h, sizeof before);
        sha_compress(h, blocks);
        for (int n = 0; n < 8; n++)
            h[n] = (h[n] & is_on) | (before[n] & ~is_on);
    }
    for (int lane = 0; lane < SHA_LANES; lane++)
        for (int n = 0; n < 8; n++) {
            uint32_t word = __builtin_bswap32(h[n][lane]);
            memcpy(digests + lane * SHA_BYTES + 4 * n, &word, 4);
        }
}

typedef void ShaEight(Bytes const texts[SHA_LANES], const size_t sizes[SHA_LANES], unsigned char *digests);

#define SHA_EIGHT(name)                                                                                           \
    static void name(Bytes const texts[SHA_LANES], const size_t sizes[SHA_LANES], unsigned char *digests)          \
    {                                                                                                             \
        sha_eight(texts, sizes, digests);                                                                         \
    }

SHA_EIGHT(sha_plain)
#if defined(__x86_64__)
__attribute__((target("avx2"))) SHA_EIGHT(sha_avx2)
__attribute__((target("avx2,avx512f,avx512vl"))) SHA_EIGHT(sha_avx512)
#endif

static ShaEight *sha_of_this_machine(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512vl"))
        return sha_avx512;
    if (__builtin_cpu_supports("avx2"))
        return sha_avx2;
#endif
    return sha_plain;
}

/* ---- many hashes in one call */

/* All that is hashed in one text, and where each ends: what all begin with, then what stands in its row of the columns. */
typedef struct {
    Text text;
    size_t *ends;
    Py_ssize_t count;
} Parts;

static void free_parts(Parts *parts)
{
    PyMem_Free(parts->text.data);
    PyMem_Free(parts->ends);
}

/* How many rows the lists among the columns have. -1 when they differ, or there is none. */
static Py_ssize_t rows_of(PyObject *columns)
{
    Py_ssize_t count = -1;
    for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(columns); n++) {
        PyObject *column = PyTuple_GET_ITEM(columns, n);
        if (!PyList_CheckExact(column))
            continue;
        if (count >= 0 && PyList_GET_SIZE(column) != count)
            return -1;
        count = PyList_GET_SIZE(column);
    }
    return count;
}

static int append_row(Text *text, PyObject *columns, Py_ssize_t row)
{
    for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(columns); n++) {
        PyObject *column = PyTuple_GET_ITEM(columns, n);
        if (!append_piece(text, PyList_CheckExact(column) ? PyList_GET_ITEM(column, row) : column))
            return 0;
    }
    return 1;
}

static int read_parts(const Py_buffer *begin, PyObject *columns, Parts *parts)
{
    *parts = (Parts){{NULL, 0, 0}, NULL, 0};
    if (!PyTuple_CheckExact(columns) || (parts->count = rows_of(columns)) < 0) {
        PyErr_SetString(PyExc_ValueError, "a tuple of columns, of which some are lists of one length");
        return 0;
    }
    parts->ends = PyMem_New(size_t, parts->count + 1);
    int is_good = parts->ends != NULL;
    if (!is_good)
        PyErr_NoMemory();
    for (Py_ssize_t n = 0; is_good && n < parts->count; n++) {
        is_good = append(&parts->text, begin->buf, begin->len) && append_row(&parts->text, columns, n);
        parts->ends[n] = parts->text.size;
    }
    if (!is_good)
        free_parts(parts);
    return is_good;
}

static inline Bytes part_at(const Parts *parts, Py_ssize_t n, size_t *size)
{
    size_t start = n ? parts->ends[n - 1] : 0;
    *size = parts->ends[n] - start;
    return parts->text.data + start;
}

/* The interpreter is handed over only for long: for a millisecond or less, getting it back takes longer. */
#define LONG_BYTES (1 << 20)

static PyThreadState *let_others_run(const Parts *parts)
{
    return parts->text.size > LONG_BYTES ? PyEval_SaveThread() : NULL;
}

static void run_again(PyThreadState *state)
{
    if (state != NULL)
        PyEval_RestoreThread(state);
}

/* Each digest to its place in `digests`, or, without such, all of them added to `sum`. */
static void blake_parts(const Parts *parts, size_t size, unsigned char *digests, uint64_t sum[8])
{
    BlakeFour *four = blake_of_this_machine();
    for (Py_ssize_t first = 0; first < parts->count; first += LANES) {
        Bytes texts[LANES] = {NULL};
        size_t sizes[LANES] = {0};
        uint64_t h[8][LANES];
        int filled = parts->count - first < LANES ? (int)(parts->count - first) : LANES;
        for (int lane = 0; lane < filled; lane++)
            texts[lane] = part_at(parts, first + lane, &sizes[lane]);
        four(texts, sizes, size, h);
        for (int lane = 0; lane < filled; lane++) {
            uint64_t one[8];
            for (int n = 0; n < 8; n++)
                one[n] = h[n][lane];
            if (digests != NULL)
                memcpy(digests + (first + lane) * size, one, size);
            else
                for (int n = 0; n < 8; n++)
                    sum[n] += one[n];
        }
    }
}

static void sha_parts(const Parts *parts, unsigned char *digests)
{
    ShaEight *eight = sha_of_this_machine();
    for (Py_ssize_t first = 0; first < parts->count; first += SHA_LANES) {
        Bytes texts[SHA_LANES] = {NULL};
        size_t sizes[SHA_LANES] = {0};
        unsigned char made[SHA_LANES * SHA_BYTES];
        int filled = parts->count - first < SHA_LANES ? (int)(parts->count - first) : SHA_LANES;
        for (int lane = 0; lane < filled; lane++)
            texts[lane] = part_at(parts, first + lane, &sizes[lane]);
        eight(texts, sizes, made);
        memcpy(digests + first * SHA_BYTES, made, (size_t)filled * SHA_BYTES);
    }
}

static PyObject *list_of(const unsigned char *digests, Py_ssize_t count, Py_ssize_t size)
{
    PyObject *found = PyList_New(count);
    for (Py_ssize_t n = 0; found != NULL && n < count; n++) {
        PyObject *one = PyBytes_FromStringAndSize((const char *)digests + n * size, size);
        if (one == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, n, one);
    }
    return found;
}

PyDoc_STRVAR(blake2b_all_doc,
    "blake2b_all(begin, columns, size) -> list\n\n"
    "The digest of `begin` with each row of the columns behind it. A column is a list of pieces or one piece for all rows,\n"
    "a piece is bytes, text (as UTF-8), or a whole number from 0 on (in decimal).");

static PyObject *blake2b_all(PyObject *module, PyObject *args)
{
    Py_buffer begin;
    PyObject *given, *found = NULL;
    Py_ssize_t size;
    Parts parts;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*On", &begin, &given, &size))
        return NULL;
    if (size < 1 || size > STATE_BYTES)
        PyErr_SetString(PyExc_ValueError, "a digest has 1 to 64 bytes");
    else if (read_parts(&begin, given, &parts)) {
        unsigned char *digests = PyMem_Malloc(parts.count * size + 1);
        if (digests == NULL)
            PyErr_NoMemory();
        else {
            PyThreadState *state = let_others_run(&parts);
            blake_parts(&parts, size, digests, NULL);
            run_again(state);
            found = list_of(digests, parts.count, size);
        }
        PyMem_Free(digests);
        free_parts(&parts);
    }
    PyBuffer_Release(&begin);
    return found;
}

PyDoc_STRVAR(blake2b_sum_doc,
    "blake2b_sum(begin, columns) -> bytes\n\n"
    "The digests of 64 bytes that `blake2b_all` would give, added up in eight lanes of 64 bits.");

static PyObject *blake2b_sum(PyObject *module, PyObject *args)
{
    Py_buffer begin;
    PyObject *given;
    Parts parts;
    uint64_t sum[8] = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*O", &begin, &given))
        return NULL;
    int is_read = read_parts(&begin, given, &parts);
    if (is_read) {
        PyThreadState *state = let_others_run(&parts);
        blake_parts(&parts, STATE_BYTES, NULL, sum);
        run_again(state);
        free_parts(&parts);
    }
    PyBuffer_Release(&begin);
    return is_read ? PyBytes_FromStringAndSize((const char *)sum, sizeof sum) : NULL;
}

PyDoc_STRVAR(sha256_all_doc, "sha256_all(begin, columns) -> list\n\nAs blake2b_all, with SHA-256.");

static PyObject *sha256_all(PyObject *module, PyObject *args)
{
    Py_buffer begin;
    PyObject *given, *found = NULL;
    Parts parts;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*O", &begin, &given))
        return NULL;
    if (read_parts(&begin, given, &parts)) {
        unsigned char *digests = PyMem_Malloc(parts.count * SHA_BYTES + 1);
        if (digests == NULL)
            PyErr_NoMemory();
        else {
            PyThreadState *state = let_others_run(&parts);
            sha_parts(&parts, digests);
            run_again(state);
            found = list_of(digests, parts.count, SHA_BYTES);
        }
        PyMem_Free(digests);
        free_parts(&parts);
    }
    PyBuffer_Release(&begin);
    return found;
}

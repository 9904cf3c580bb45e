/* The loops over every message that cost most in Python: frames of the NATS protocol, and hashes.

Each function has a twin in Python that gives the same; tests hold the two against each other. Nothing here decides
anything: whatever is unusual is left to the twin, by stopping in front of it or by returning None.

No function keeps anything between calls, and none writes outside of what it allocated or was handed to fill. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stdint.h>
#include <string.h>

typedef const unsigned char *Bytes;

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read lowest byte first"
#endif

#define SIZE_DIGITS_MAX 8    /* 64 MiB have eight */
#define NUMBER_DIGITS_MAX 19 /* nanoseconds since 1970 */
#define FRAME_BYTES_MAX (64 * 1024 * 1024 + 64 * 1024)
#define BLANK 0x20

/* ---- numbers and lines */

/* The digits at `at`, as a number of at most 63 bits. Moves `at` behind them; -1 when there are none, or too many. */
static inline int64_t number_at(Bytes *at, Bytes end, int digits_max)
{
    Bytes p = *at;
    uint64_t value = 0;
    while (p < end && (unsigned)(*p - '0') <= 9) {
        if (p - *at == digits_max)
            return -1;
        value = value * 10 + (*p++ - '0');
    }
    if (p == *at || value > INT64_MAX)
        return -1;
    *at = p;
    return (int64_t)value;
}

/* One byte that must stand at `at`. */
static inline int takes(Bytes *at, Bytes end, unsigned char byte)
{
    if (*at == end || **at != byte)
        return 0;
    (*at)++;
    return 1;
}

static inline int takes_crlf(Bytes *at, Bytes end)
{
    if (end - *at < 2 || (*at)[0] != '\r' || (*at)[1] != '\n')
        return 0;
    *at += 2;
    return 1;
}

/* A word of a line: everything up to the next blank or control character. */
static inline Bytes word_end(Bytes at, Bytes end)
{
    while (at < end && *at > BLANK)
        at++;
    return at;
}

/* `MSG ` or `HMSG `. Moves `at` behind it; 0 when it is neither, else 1, or 2 where headers follow. */
static inline int kind_at(Bytes *at, Bytes end)
{
    if (end - *at >= 4 && memcmp(*at, "MSG ", 4) == 0) {
        *at += 4;
        return 1;
    }
    if (end - *at >= 5 && memcmp(*at, "HMSG ", 5) == 0) {
        *at += 5;
        return 2;
    }
    return 0;
}

/* The end of a line, `[<head> ]<size> CRLF`, and the counted bytes behind it with their CRLF. */
typedef struct {
    Bytes header, payload, stop, end;
} Body;

static inline int body_at(Bytes at, Bytes end, int has_head, Body *body)
{
    int64_t head = 0;
    if (has_head) {
        head = number_at(&at, end, SIZE_DIGITS_MAX);
        if (head < 0 || !takes(&at, end, ' '))
            return 0;
    }
    int64_t size = number_at(&at, end, SIZE_DIGITS_MAX);
    if (size < head || size > FRAME_BYTES_MAX || !takes_crlf(&at, end) || end - at < size + 2)
        return 0;
    body->header = at;
    body->payload = at + head;
    body->stop = at + size;
    body->end = body->stop;
    return takes_crlf(&body->end, end);
}

/* ---- deliveries of a pull consumer, as rows of positions */

enum {
    START, END, SUBJECT_START, SUBJECT_END, HEADER_START, PAYLOAD_START, PAYLOAD_END,
    SEQUENCE, CONSUMER_SEQUENCE, TIMESTAMP_NS, PENDING, COLUMNS
};

/* One delivery at `p`, whose line has `between` behind its subject. */
static int delivery_at(Bytes base, Bytes p, Bytes end, const Py_buffer *between, int64_t *row)
{
    Bytes at = p;
    Body body;
    int kind = kind_at(&at, end);
    if (!kind)
        return 0;
    row[SUBJECT_START] = at - base;
    Bytes subject_end = word_end(at, end);
    if (subject_end == at || end - subject_end < between->len || memcmp(subject_end, between->buf, between->len) != 0)
        return 0;
    row[SUBJECT_END] = subject_end - base;
    at = subject_end + between->len;
    int64_t numbers[5];
    for (int n = 0; n < 5; n++) {
        numbers[n] = number_at(&at, end, NUMBER_DIGITS_MAX);
        if (numbers[n] < 0 || !takes(&at, end, n < 4 ? '.' : ' '))
            return 0;
    }
    if (!body_at(at, end, kind == 2, &body))
        return 0;
    row[START] = p - base;
    row[END] = body.end - base;
    row[HEADER_START] = body.header - base;
    row[PAYLOAD_START] = body.payload - base;
    row[PAYLOAD_END] = body.stop - base;
    row[SEQUENCE] = numbers[1];
    row[CONSUMER_SEQUENCE] = numbers[2];
    row[TIMESTAMP_NS] = numbers[3];
    row[PENDING] = numbers[4];
    return 1;
}

/* Behind the next CRLF, or the end. */
static Bytes next_line(Bytes p, Bytes end)
{
    while (p < end && (p = memchr(p, '\r', end - p)) != NULL) {
        if (end - p >= 2 && p[1] == '\n')
            return p + 2;
        p++;
    }
    return end;
}

PyDoc_STRVAR(deliveries_doc,
    "deliveries(buffer, between, table) -> count\n\n"
    "Fills the columns of `table` (11 rows of int64, as wide as wanted) with the deliveries that begin at a line of\n"
    "`buffer`, in order, as far as they fit. After one, the next is looked for behind it; after a line that is none,\n"
    "behind that line.");

static PyObject *deliveries(PyObject *module, PyObject *args)
{
    Py_buffer buffer, between, table;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*w*", &buffer, &between, &table))
        return NULL;
    Py_ssize_t room = table.len / (Py_ssize_t)(COLUMNS * sizeof(int64_t)), count = 0;
    int64_t *columns = table.buf, row[COLUMNS];
    Py_BEGIN_ALLOW_THREADS
    Bytes base = buffer.buf, p = base, end = base + buffer.len;
    while (p < end && count < room) {
        if (delivery_at(base, p, end, &between, row)) {
            for (int n = 0; n < COLUMNS; n++)
                columns[n * room + count] = row[n];
            count++;
            p = base + row[END];
        } else
            p = next_line(p, end);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buffer);
    PyBuffer_Release(&between);
    PyBuffer_Release(&table);
    return PyLong_FromSsize_t(count);
}

PyDoc_STRVAR(gather_doc,
    "gather(buffer, starts, ends, offsets, values) -> None\n\n"
    "Copies buffer[starts[n]:ends[n]] (int64) one behind the other to `values`, and notes in `offsets` (int32, one more)\n"
    "where each begins. ValueError when a piece is not inside of the buffer, or they do not fill `values` exactly.");

static PyObject *gather(PyObject *module, PyObject *args)
{
    Py_buffer buffer, starts, ends, offsets, values;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*w*w*", &buffer, &starts, &ends, &offsets, &values))
        return NULL;
    Py_ssize_t count = starts.len / (Py_ssize_t)sizeof(int64_t), filled = 0, n = 0;
    int is_good = ends.len == starts.len && offsets.len == (count + 1) * (Py_ssize_t)sizeof(int32_t)
                  && values.len <= INT32_MAX;
    if (is_good) {
        Py_BEGIN_ALLOW_THREADS
        const int64_t *start = starts.buf, *end = ends.buf;
        int32_t *offset = offsets.buf;
        for (; n < count; n++) {
            int64_t size = end[n] - start[n];
            if (start[n] < 0 || size < 0 || end[n] > buffer.len || size > values.len - filled)
                break;
            offset[n] = (int32_t)filled;
            memcpy((char *)values.buf + filled, (const char *)buffer.buf + start[n], size);
            filled += size;
        }
        offset[n] = (int32_t)filled;
        Py_END_ALLOW_THREADS
        is_good = n == count && filled == values.len;
    }
    PyBuffer_Release(&buffer);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&ends);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&values);
    if (!is_good) {
        PyErr_SetString(PyExc_ValueError, "pieces that are not in the buffer, or do not fit");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- any message, as an object */

PyDoc_STRVAR(messages_doc,
    "messages(data, position, make, events) -> position\n\n"
    "Appends make(sid, subject, reply, header, payload) for each complete message from `position` on, and returns where\n"
    "the first thing begins that is none: another line, an odd spelling, or one that is not complete.");

static PyObject *messages(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 4 || !PyBytes_Check(args[0]) || !PyList_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "messages(bytes, int, callable, list)");
        return NULL;
    }
    Py_ssize_t position = PyLong_AsSsize_t(args[1]), size = PyBytes_GET_SIZE(args[0]);
    if (position == -1 && PyErr_Occurred())
        return NULL;
    if (position < 0 || position > size)
        position = size;
    Bytes base = (Bytes)PyBytes_AS_STRING(args[0]), p = base + position, end = base + size;
    PyObject *empty = PyBytes_FromStringAndSize(NULL, 0), *subject = NULL, *sid = NULL;
    int64_t last_sid = -1;
    int is_failed = empty == NULL;
    while (!is_failed && p < end) {
        Bytes at = p, reply = NULL, reply_end = NULL;
        Body body;
        int kind = kind_at(&at, end);
        if (!kind)
            break;
        Bytes subject_start = at, subject_end = word_end(at, end);
        at = subject_end;
        if (subject_end == subject_start || !takes(&at, end, ' '))
            break;
        int64_t number = number_at(&at, end, 18);
        if (number < 0 || !takes(&at, end, ' '))
            break;
        /* Two numbers behind the reply of an HMSG, one behind that of a MSG: without a reply there is a word less. */
        Bytes word = at, after = word_end(at, end);
        if (after == end)
            break;
        Bytes second = after, second_end = after;
        if (*after == ' ') {
            second = after + 1;
            second_end = word_end(second, end);
        }
        int has_reply = kind == 1 ? *after == ' ' : *after == ' ' && second_end < end && *second_end == ' ';
        if (has_reply) {
            reply = word;
            reply_end = after;
            at = second;
        }
        if (!body_at(at, end, kind == 2, &body))
            break;
        if (subject == NULL || PyBytes_GET_SIZE(subject) != subject_end - subject_start
            || memcmp(PyBytes_AS_STRING(subject), subject_start, subject_end - subject_start) != 0)
            Py_XSETREF(subject, PyBytes_FromStringAndSize((const char *)subject_start, subject_end - subject_start));
        if (number != last_sid || sid == NULL) {
            Py_XSETREF(sid, PyLong_FromLongLong(number));
            last_sid = number;
        }
        PyObject *parts[5] = {sid, subject, empty, empty, NULL};
        if (has_reply)
            parts[2] = PyBytes_FromStringAndSize((const char *)reply, reply_end - reply);
        if (body.payload > body.header)
            parts[3] = PyBytes_FromStringAndSize((const char *)body.header, body.payload - body.header);
        parts[4] = PyBytes_FromStringAndSize((const char *)body.payload, body.stop - body.payload);
        PyObject *made = NULL;
        if (sid && subject && parts[2] && parts[3] && parts[4])
            made = PyObject_Vectorcall(args[2], parts, 5, NULL);
        if (has_reply)
            Py_XDECREF(parts[2]);
        if (body.payload > body.header)
            Py_XDECREF(parts[3]);
        Py_XDECREF(parts[4]);
        is_failed = made == NULL || PyList_Append(args[3], made) < 0;
        Py_XDECREF(made);
        p = body.end;
    }
    Py_XDECREF(empty);
    Py_XDECREF(subject);
    Py_XDECREF(sid);
    return is_failed ? NULL : PyLong_FromSsize_t(p - base);
}

/* ---- where deliveries stand, read from their reply subjects */

PyDoc_STRVAR(replies_doc,
    "replies(replies, begin, make, stream, consumer) -> list | None\n\n"
    "make(stream, consumer, deliveries, sequence, timestamp_ns, consumer sequence, pending) for each reply, the last two as\n"
    "bytes. None when one of them is not `begin` and five numbers joined by dots.");

static PyObject *replies(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 5 || !PyList_CheckExact(args[0]) || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "replies(list, bytes, callable, stream, consumer)");
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(args[0]), begin_size = PyBytes_GET_SIZE(args[1]);
    const char *begin = PyBytes_AS_STRING(args[1]);
    PyObject *found = PyList_New(count), *deliveries = NULL;
    int64_t last_deliveries = -1;
    int is_odd = 0;
    for (Py_ssize_t n = 0; found != NULL && !is_odd && n < count; n++) {
        PyObject *reply = PyList_GET_ITEM(args[0], n);
        is_odd = !PyBytes_Check(reply) || PyBytes_GET_SIZE(reply) < begin_size
                 || memcmp(PyBytes_AS_STRING(reply), begin, begin_size) != 0;
        if (is_odd)
            break;
        Bytes at = (Bytes)PyBytes_AS_STRING(reply) + begin_size, starts[5], ends[5];
        Bytes end = (Bytes)PyBytes_AS_STRING(reply) + PyBytes_GET_SIZE(reply);
        int64_t numbers[5];
        for (int m = 0; m < 5 && !is_odd; m++) {
            starts[m] = at;
            numbers[m] = number_at(&at, end, NUMBER_DIGITS_MAX);
            ends[m] = at;
            is_odd = numbers[m] < 0 || (m < 4 ? !takes(&at, end, '.') : at != end);
        }
        if (is_odd)
            break;
        if (numbers[0] != last_deliveries) {
            Py_XSETREF(deliveries, PyLong_FromLongLong(numbers[0]));
            last_deliveries = numbers[0];
        }
        PyObject *parts[7] = {
            args[3], args[4], deliveries, PyLong_FromLongLong(numbers[1]), PyLong_FromLongLong(numbers[3]),
            PyBytes_FromStringAndSize((const char *)starts[2], ends[2] - starts[2]),
            PyBytes_FromStringAndSize((const char *)starts[4], ends[4] - starts[4]),
        };
        PyObject *made = NULL;
        if (deliveries && parts[3] && parts[4] && parts[5] && parts[6])
            made = PyObject_Vectorcall(args[2], parts, 7, NULL);
        for (int m = 3; m < 7; m++)
            Py_XDECREF(parts[m]);
        if (made == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, n, made);
    }
    Py_XDECREF(deliveries);
    if (is_odd) {
        Py_XDECREF(found);
        Py_RETURN_NONE;
    }
    return found;
}

/* ---- what is hashed: parts of bytes, text and whole numbers, one behind the other */

typedef struct {
    unsigned char *data;
    size_t size, room;
} Text;

static int make_room(Text *text, size_t more)
{
    if (text->room - text->size >= more)
        return 1;
    size_t room = 2 * text->room + more + 4096;
    unsigned char *data = PyMem_Realloc(text->data, room);
    if (data == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    text->data = data;
    text->room = room;
    return 1;
}

static int append(Text *text, const void *data, size_t size)
{
    if (size == 0)
        return 1;
    if (!make_room(text, size))
        return 0;
    memcpy(text->data + text->size, data, size);
    text->size += size;
    return 1;
}

static int append_number(Text *text, unsigned long long value)
{
    unsigned char digits[20], *first = digits + sizeof digits;
    do
        *--first = '0' + value % 10;
    while (value /= 10);
    return append(text, first, digits + sizeof digits - first);
}

static int append_piece(Text *text, PyObject *piece)
{
    if (PyBytes_Check(piece))
        return append(text, PyBytes_AS_STRING(piece), PyBytes_GET_SIZE(piece));
    if (PyUnicode_Check(piece)) {
        Py_ssize_t size;
        const char *utf8 = PyUnicode_AsUTF8AndSize(piece, &size);
        return utf8 != NULL && append(text, utf8, size);
    }
    if (PyLong_CheckExact(piece)) {
        unsigned long long value = PyLong_AsUnsignedLongLong(piece);
        if (value == (unsigned long long)-1 && PyErr_Occurred())
            return 0;
        return append_number(text, value);
    }
    PyErr_SetString(PyExc_TypeError, "a part is bytes, text, a whole number, or a tuple of those");
    return 0;
}

static int append_part(Text *text, PyObject *part)
{
    if (!PyTuple_CheckExact(part))
        return append_piece(text, part);
    for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(part); n++)
        if (!append_piece(text, PyTuple_GET_ITEM(part, n)))
            return 0;
    return 1;
}

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

/* ---- SHA-256 (FIPS 180-4), where the processor does it; elsewhere OpenSSL is quicker than anything written here */

#define SHA_BLOCK 64
#define SHA_BYTES 32

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define HAS_SHA 1

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

static int has_sha(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1) || !(c & bit_SSSE3))
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 29));
}

/* Four rounds at a time; the schedule of the message is kept in a ring of four. */
__attribute__((target("sha,sse4.1,ssse3"))) static void sha_compress(uint32_t h[8], Bytes block)
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i low = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)&h[0]), 0xb1);
    __m128i high = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)&h[4]), 0x1b);
    __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xf0);
    __m128i abef_before = abef, cdgh_before = cdgh, w[4];
#pragma GCC unroll 16
    for (int n = 0; n < 16; n++) {
        __m128i now;
        if (n < 4)
            now = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(block + 16 * n)), swap);
        else {
            __m128i before = w[(n + 3) & 3];
            now = _mm_add_epi32(_mm_sha256msg1_epu32(w[n & 3], w[(n + 1) & 3]),
                                _mm_alignr_epi8(before, w[(n + 2) & 3], 4));
            now = _mm_sha256msg2_epu32(now, before);
        }
        w[n & 3] = now;
        __m128i with_k = _mm_add_epi32(now, _mm_loadu_si128((const __m128i *)&SHA_K[4 * n]));
        cdgh = _mm_sha256rnds2_epu32(cdgh, abef, with_k);
        abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(with_k, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
    low = _mm_shuffle_epi32(abef, 0x1b);
    high = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)&h[0], _mm_blend_epi16(low, high, 0xf0));
    _mm_storeu_si128((__m128i *)&h[4], _mm_alignr_epi8(high, low, 8));
}

static void sha256(Bytes text, size_t size, unsigned char digest[SHA_BYTES])
{
    uint32_t h[8] = {
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
    };
    unsigned char tail[2 * SHA_BLOCK] = {0};
    size_t whole = size / SHA_BLOCK * SHA_BLOCK, left = size - whole;
    size_t tail_bytes = left + 9 <= SHA_BLOCK ? SHA_BLOCK : 2 * SHA_BLOCK;
    uint64_t bits = __builtin_bswap64((uint64_t)size * 8);
    if (left)
        memcpy(tail, text + whole, left);
    tail[left] = 0x80;
    memcpy(tail + tail_bytes - 8, &bits, 8);
    for (size_t at = 0; at < whole; at += SHA_BLOCK)
        sha_compress(h, text + at);
    for (size_t at = 0; at < tail_bytes; at += SHA_BLOCK)
        sha_compress(h, tail + at);
    for (int n = 0; n < 8; n++) {
        uint32_t word = __builtin_bswap32(h[n]);
        memcpy(digest + 4 * n, &word, 4);
    }
}
#endif

/* ---- many hashes in one call */

/* All parts of a sequence in one text, each behind what all begin with, and where each ends. */
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

static int read_parts(const Py_buffer *begin, PyObject *given, Parts *parts)
{
    *parts = (Parts){{NULL, 0, 0}, NULL, 0};
    PyObject *sequence = PySequence_Fast(given, "parts must be a sequence");
    if (sequence == NULL)
        return 0;
    parts->count = PySequence_Fast_GET_SIZE(sequence);
    parts->ends = PyMem_New(size_t, parts->count + 1);
    int is_good = parts->ends != NULL;
    if (!is_good)
        PyErr_NoMemory();
    for (Py_ssize_t n = 0; is_good && n < parts->count; n++) {
        is_good = append(&parts->text, begin->buf, begin->len)
                  && append_part(&parts->text, PySequence_Fast_GET_ITEM(sequence, n));
        parts->ends[n] = parts->text.size;
    }
    Py_DECREF(sequence);
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
    "blake2b_all(begin, parts, size) -> list\n\n"
    "The digest of `begin` with each of the parts behind it. A part is bytes, text (as UTF-8), a whole number from 0 on\n"
    "(in decimal), or a tuple of those, one behind the other.");

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
    "blake2b_sum(begin, parts) -> bytes\n\n"
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

#ifdef HAS_SHA
PyDoc_STRVAR(sha256_all_doc, "sha256_all(begin, parts) -> list\n\nAs blake2b_all, with SHA-256.");

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
            for (Py_ssize_t n = 0; n < parts.count; n++) {
                size_t size;
                Bytes text = part_at(&parts, n, &size);
                sha256(text, size, digests + n * SHA_BYTES);
            }
            run_again(state);
            found = list_of(digests, parts.count, SHA_BYTES);
        }
        PyMem_Free(digests);
        free_parts(&parts);
    }
    PyBuffer_Release(&begin);
    return found;
}
#endif

/* ---- fields of a Struct, at their places in memory */

/* Where each of these fields stands in the objects of a type, all of which hold objects there. 0: not as expected. */
static int places_of(PyObject *type, const char *const names[], int count, Py_ssize_t places[])
{
    for (int n = 0; n < count; n++) {
        PyObject *found = PyObject_GetAttrString(type, names[n]);
        if (found == NULL) {
            PyErr_Clear();
            return 0;
        }
        int is_good = Py_IS_TYPE(found, &PyMemberDescr_Type)
                      && ((PyMemberDescrObject *)found)->d_member->type == T_OBJECT_EX;
        places[n] = is_good ? ((PyMemberDescrObject *)found)->d_member->offset : 0;
        Py_DECREF(found);
        if (!is_good)
            return 0;
    }
    return 1;
}

static inline PyObject *field(PyObject *object, Py_ssize_t place)
{
    return *(PyObject **)((char *)object + place);
}

/* Text of ASCII alone. */
typedef struct {
    const char *data;
    Py_ssize_t size;
} Ascii;

static inline int ascii_of(PyObject *text, Ascii *found)
{
    if (text == NULL || !PyUnicode_Check(text) || PyUnicode_READY(text) < 0 || !PyUnicode_IS_COMPACT_ASCII(text))
        return 0;
    found->data = (const char *)PyUnicode_1BYTE_DATA(text);
    found->size = PyUnicode_GET_LENGTH(text);
    return 1;
}

static inline int utf8_of(PyObject *text, Ascii *found)
{
    if (ascii_of(text, found))
        return 1;
    if (text == NULL || !PyUnicode_Check(text))
        return 0;
    found->data = PyUnicode_AsUTF8AndSize(text, &found->size);
    if (found->data == NULL)
        PyErr_Clear();
    return found->data != NULL;
}

/* Text that needs no escapes in JSON and can break out of no header. */
static inline int is_plain(const Ascii *text)
{
    for (Py_ssize_t n = 0; n < text->size; n++) {
        unsigned char one = text->data[n];
        if (one < ' ' || one > '~' || one == '"' || one == '\\')
            return 0;
    }
    return 1;
}

#define APPEND(text, constant) append(text, constant, sizeof(constant) - 1)

static inline int append_ascii(Text *text, const Ascii *more)
{
    return append(text, more->data, more->size);
}

PyDoc_STRVAR(frames_doc,
    "frames(messages, kind, target, extras, replies, step) -> (pieces, longest) | None\n\n"
    "The frames of messages (all of type `kind`, Outgoing) to one subject that carry an id and a trace and nothing else,\n"
    "`step` of them to a piece, and the size of the longest with its headers. None when there is another among them.");

static PyObject *frames(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    static const char *const names[] = {
        "subject", "payload", "msg_id", "headers", "expected_stream", "expected_last_sequence",
        "expected_last_subject_sequence", "traceparent",
    };
    Py_ssize_t at[8], step, longest = 0;
    Ascii target, subject;
    (void)module;
    if (nargs != 6 || !PyType_Check(args[1]) || !PyBytes_Check(args[2]) || !PyList_CheckExact(args[3])
        || !PyList_CheckExact(args[4]) || (step = PyLong_AsSsize_t(args[5])) < 1) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "frames(sequence, type, bytes, list, list, step)");
        return NULL;
    }
    PyObject *messages = PySequence_Fast(args[0], "messages must be a sequence");
    if (messages == NULL)
        return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(messages);
    PyObject *pieces = PyList_New(0);
    Text text = {NULL, 0, 0};
    int is_odd = PyList_GET_SIZE(args[3]) != count || PyList_GET_SIZE(args[4]) != count || !count
                 || !places_of(args[1], names, 8, at);
    int is_failed = pieces == NULL;
    target = (Ascii){PyBytes_AS_STRING(args[2]), PyBytes_GET_SIZE(args[2])};
    subject = (Ascii){NULL, 0};
    for (Py_ssize_t n = 0; n < count && !is_odd && !is_failed; n++) {
        PyObject *one = PySequence_Fast_GET_ITEM(messages, n), *payload, *headers, *expected;
        Ascii id, trace, extra, reply, own_subject, stream;
        is_odd = !Py_IS_TYPE(one, (PyTypeObject *)args[1]);
        if (is_odd)
            break;
        payload = field(one, at[1]);
        headers = field(one, at[3]);
        expected = field(one, at[4]);
        is_odd = !ascii_of(field(one, at[0]), &own_subject) || !ascii_of(field(one, at[2]), &id)
                 || !ascii_of(field(one, at[7]), &trace) || !ascii_of(PyList_GET_ITEM(args[3], n), &extra)
                 || !ascii_of(PyList_GET_ITEM(args[4], n), &reply) || !ascii_of(expected, &stream) || stream.size
                 || headers != Py_None || field(one, at[5]) != Py_None || field(one, at[6]) != Py_None
                 || payload == NULL || !PyBytes_Check(payload) || !id.size || !trace.size || !is_plain(&id)
                 || !is_plain(&trace);
        if (is_odd)
            break;
        if (n == 0)
            subject = own_subject;
        is_odd = subject.size != own_subject.size || memcmp(subject.data, own_subject.data, subject.size) != 0;
        if (is_odd)
            break;
        Py_ssize_t head = sizeof("NATS/1.0\r\nNats-Msg-Id: \r\ntraceparent: \r\n\r\n") - 1 + id.size + trace.size + extra.size;
        Py_ssize_t size = head + PyBytes_GET_SIZE(payload);
        longest = size > longest ? size : longest;
        is_failed = !(APPEND(&text, "HPUB ") && append_ascii(&text, &target) && APPEND(&text, " ")
                      && append_ascii(&text, &reply) && APPEND(&text, " ") && append_number(&text, head)
                      && APPEND(&text, " ") && append_number(&text, size) && APPEND(&text, "\r\nNATS/1.0\r\nNats-Msg-Id: ")
                      && append_ascii(&text, &id) && APPEND(&text, "\r\ntraceparent: ") && append_ascii(&text, &trace)
                      && APPEND(&text, "\r\n") && append_ascii(&text, &extra) && APPEND(&text, "\r\n")
                      && append(&text, PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload)) && APPEND(&text, "\r\n"));
        if (!is_failed && ((n + 1) % step == 0 || n + 1 == count)) {
            PyObject *piece = PyBytes_FromStringAndSize((const char *)text.data, text.size);
            is_failed = piece == NULL || PyList_Append(pieces, piece) < 0;
            Py_XDECREF(piece);
            text.size = 0;
        }
    }
    PyMem_Free(text.data);
    Py_DECREF(messages);
    if (is_failed || is_odd) {
        Py_XDECREF(pieces);
        return is_failed ? NULL : Py_NewRef(Py_None);
    }
    return Py_BuildValue("Nn", pieces, longest);
}

#ifdef HAS_SHA
PyDoc_STRVAR(caused_doc,
    "caused(effects, begin, make, plain, input, envelope) -> list | None\n\n"
    "make(id, subject, body, None, stream, trace) for each effect (all of type `plain`, its cause of type `input`, that\n"
    "one's envelope of type `envelope`). None when one of them needs a closer look.");

static PyObject *caused(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    static const char *const plain_names[] = {"cause", "index", "subject", "stream", "around", "payload"};
    static const char *const input_names[] = {"identity", "envelope"};
    static const char *const envelope_names[] = {"id", "ts", "trace_id", "correlation_id"};
    static const char hex[] = "0123456789abcdef";
    Py_ssize_t plain_at[6], input_at[2], envelope_at[4];
    (void)module;
    if (nargs != 6 || !PyList_CheckExact(args[0]) || !PyBytes_Check(args[1]) || !PyType_Check(args[3])
        || !PyType_Check(args[4]) || !PyType_Check(args[5])) {
        PyErr_SetString(PyExc_TypeError, "caused(list, bytes, callable, type, type, type)");
        return NULL;
    }
    if (!places_of(args[3], plain_names, 6, plain_at) || !places_of(args[4], input_names, 2, input_at)
        || !places_of(args[5], envelope_names, 4, envelope_at))
        Py_RETURN_NONE;
    Py_ssize_t count = PyList_GET_SIZE(args[0]);
    PyObject *found = PyList_New(count);
    Text text = {NULL, 0, 0};
    int is_odd = 0;
    for (Py_ssize_t n = 0; found != NULL && n < count; n++) {
        PyObject *effect = PyList_GET_ITEM(args[0], n), *cause = NULL, *envelope = NULL, *around = NULL;
        Ascii identity, cause_id, trace_id, correlation, payload, pieces[9];
        unsigned char digest[SHA_BYTES];
        char id[44] = "fx.", trace[64];
        is_odd = !Py_IS_TYPE(effect, (PyTypeObject *)args[3]) || !(cause = field(effect, plain_at[0]))
                 || !Py_IS_TYPE(cause, (PyTypeObject *)args[4]) || !(envelope = field(cause, input_at[1]))
                 || !Py_IS_TYPE(envelope, (PyTypeObject *)args[5]) || !(around = field(effect, plain_at[4]))
                 || !PyTuple_CheckExact(around) || PyTuple_GET_SIZE(around) != 9;
        if (is_odd)
            break;
        PyObject *index = field(effect, plain_at[1]), *ts = field(envelope, envelope_at[1]);
        PyObject *follows = field(envelope, envelope_at[3]);
        is_odd = !ascii_of(field(cause, input_at[0]), &identity) || !is_plain(&identity)
                 || !ascii_of(field(envelope, envelope_at[0]), &cause_id) || !is_plain(&cause_id)
                 || !ascii_of(field(envelope, envelope_at[2]), &trace_id) || trace_id.size != 32
                 || !utf8_of(field(effect, plain_at[5]), &payload) || !PyLong_CheckExact(index) || !PyLong_CheckExact(ts);
        correlation = cause_id;
        if (!is_odd && follows != Py_None)
            is_odd = !ascii_of(follows, &correlation) || !is_plain(&correlation);
        for (int m = 0; m < 9 && !is_odd; m++)
            is_odd = !utf8_of(PyTuple_GET_ITEM(around, m), &pieces[m]);
        if (is_odd)
            break;
        text.size = 0;
        if (!(append(&text, PyBytes_AS_STRING(args[1]), PyBytes_GET_SIZE(args[1])) && APPEND(&text, ",\"")
              && append_ascii(&text, &identity) && APPEND(&text, "\",") && append_piece(&text, index)
              && APPEND(&text, "]"))) {
            Py_CLEAR(found);
            break;
        }
        sha256(text.data, text.size, digest);
        for (int m = 0; m < 20; m++) {
            id[3 + 2 * m] = hex[digest[m] >> 4];
            id[4 + 2 * m] = hex[digest[m] & 15];
        }
        const Ascii own = {id, 43}, span = {id + 27, 16};
        memcpy(trace, "00-", 3);
        memcpy(trace + 3, trace_id.data, 32);
        trace[35] = '-';
        memcpy(trace + 36, span.data, 16);
        memcpy(trace + 52, "-01", 3);
        text.size = 0;
        if (!(append_ascii(&text, &pieces[0]) && APPEND(&text, "\"") && append_ascii(&text, &own) && APPEND(&text, "\"")
              && append_ascii(&text, &pieces[1]) && append_piece(&text, ts) && append_ascii(&text, &pieces[2])
              && APPEND(&text, "\"") && append_ascii(&text, &trace_id) && APPEND(&text, "\"")
              && append_ascii(&text, &pieces[3]) && APPEND(&text, "\"") && append_ascii(&text, &span) && APPEND(&text, "\"")
              && append_ascii(&text, &pieces[4]) && append_ascii(&text, &payload) && append_ascii(&text, &pieces[5])
              && APPEND(&text, "\"") && append_ascii(&text, &own) && APPEND(&text, "\"")
              && append_ascii(&text, &pieces[6]) && APPEND(&text, "\"") && append_ascii(&text, &cause_id)
              && APPEND(&text, "\"") && append_ascii(&text, &pieces[7]) && APPEND(&text, "\"")
              && append_ascii(&text, &correlation) && APPEND(&text, "\"") && append_ascii(&text, &pieces[8]))) {
            Py_CLEAR(found);
            break;
        }
        PyObject *parts[6] = {
            PyUnicode_FromStringAndSize(own.data, own.size), field(effect, plain_at[2]),
            PyBytes_FromStringAndSize((const char *)text.data, text.size), Py_None, field(effect, plain_at[3]),
            PyUnicode_FromStringAndSize(trace, 55),
        };
        PyObject *made = NULL;
        if (parts[0] && parts[1] && parts[2] && parts[4] && parts[5])
            made = PyObject_Vectorcall(args[2], parts, 6, NULL);
        Py_XDECREF(parts[0]);
        Py_XDECREF(parts[2]);
        Py_XDECREF(parts[5]);
        if (made == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, n, made);
    }
    PyMem_Free(text.data);
    if (is_odd) {
        Py_XDECREF(found);
        Py_RETURN_NONE;
    }
    return found;
}
#endif

static PyMethodDef methods[] = {
    {"frames", (PyCFunction)(void (*)(void))frames, METH_FASTCALL, frames_doc},
    {"replies", (PyCFunction)(void (*)(void))replies, METH_FASTCALL, replies_doc},
    {"blake2b_all", blake2b_all, METH_VARARGS, blake2b_all_doc},
    {"blake2b_sum", blake2b_sum, METH_VARARGS, blake2b_sum_doc},
    {"deliveries", deliveries, METH_VARARGS, deliveries_doc},
    {"gather", gather, METH_VARARGS, gather_doc},
    {"messages", (PyCFunction)(void (*)(void))messages, METH_FASTCALL, messages_doc},
    {NULL, NULL, 0, NULL},
};

#ifdef HAS_SHA
static PyMethodDef sha_methods[] = {
    {"caused", (PyCFunction)(void (*)(void))caused, METH_FASTCALL, caused_doc},
    {"sha256_all", sha256_all, METH_VARARGS, sha256_all_doc},
    {NULL, NULL, 0, NULL},
};
#endif

static int execute(PyObject *module)
{
#ifdef HAS_SHA
    if (has_sha() && PyModule_AddFunctions(module, sha_methods) < 0)
        return -1;
#endif
    (void)module;
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "oncewire.native.core", .m_size = 0, .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC PyInit_core(void)
{
    return PyModuleDef_Init(&module);
}

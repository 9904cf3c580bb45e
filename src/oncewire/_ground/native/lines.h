/* Lines of the NATS protocol: their words and numbers, and the counted bytes behind them.

    MSG  <subject> <sid> [reply] <size>          CRLF  payload          CRLF
    HMSG <subject> <sid> [reply] <head> <size>   CRLF  headers payload  CRLF */

typedef const unsigned char *Bytes;

#define SIZE_DIGITS_MAX 8    /* 64 MiB have eight */
#define NUMBER_DIGITS_MAX 19 /* nanoseconds since 1970 */
#define FRAME_BYTES_MAX (64 * 1024 * 1024 + 64 * 1024)
#define BLANK 0x20

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

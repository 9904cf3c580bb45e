/* What an agent sends: effects become messages, messages become frames. */

/* Text that is borrowed, mostly of ASCII alone. */
typedef struct {
    const char *data;
    Py_ssize_t size;
} Ascii;

static inline int ascii_of(PyObject *text, Ascii *found)
{
    if (text == NULL || !PyUnicode_Check(text) || !PyUnicode_IS_COMPACT_ASCII(text))
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

static inline int append_quoted(Text *text, const Ascii *more)
{
    return APPEND(text, "\"") && append_ascii(text, more) && APPEND(text, "\"");
}

/* ---- frames of a batch */

/* A text around a message's number in its batch: what stands before the number, and behind it in the first message, in those
between, and in the last. Nothing at all where `before` has no data. */
typedef struct {
    Ascii before, behind[3];
} Numbered;

static int read_numbered(PyObject *given, Numbered *found)
{
    memset(found, 0, sizeof *found);
    if (given == Py_None)
        return 1;
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 4)
        return 0;
    int is_good = ascii_of(PyTuple_GET_ITEM(given, 0), &found->before);
    for (int n = 0; n < 3; n++)
        is_good &= ascii_of(PyTuple_GET_ITEM(given, n + 1), &found->behind[n]);
    return is_good;
}

static inline int digits_of(unsigned long long value)
{
    int count = 1;
    while (value /= 10)
        count++;
    return count;
}

/* One message of the batch: what its frame is made of, all of it borrowed. */
typedef struct {
    Ascii id, trace, payload;
    unsigned long long number;
    int which; /* 0 the first, 1 one between, 2 the last */
} Framed;

static inline size_t numbered_size(const Numbered *text, const Framed *one)
{
    return text->before.data ? text->before.size + digits_of(one->number) + text->behind[one->which].size : 0;
}

static inline char *put(char *to, const void *data, size_t size)
{
    memcpy(to, data, size);
    return to + size;
}

#define PUT(to, constant) put(to, constant, sizeof(constant) - 1)

static inline char *put_number(char *to, unsigned long long value)
{
    int count = digits_of(value);
    for (int n = count; n-- > 0; value /= 10)
        to[n] = '0' + value % 10;
    return to + count;
}

static inline char *put_numbered(char *to, const Numbered *text, const Framed *one)
{
    if (text->before.data == NULL)
        return to;
    to = put_number(put(to, text->before.data, text->before.size), one->number);
    return put(to, text->behind[one->which].data, text->behind[one->which].size);
}

typedef struct {
    Ascii target;
    Numbered extra, reply;
} Around;

static inline size_t head_size(const Around *around, const Framed *one)
{
    return sizeof("NATS/1.0\r\nNats-Msg-Id: \r\ntraceparent: \r\n\r\n") - 1 + one->id.size + one->trace.size
           + numbered_size(&around->extra, one);
}

static inline size_t frame_size(const Around *around, const Framed *one)
{
    size_t head = head_size(around, one), size = head + one->payload.size;
    return sizeof("HPUB    \r\n\r\n") - 1 + around->target.size + numbered_size(&around->reply, one) + digits_of(head)
           + digits_of(size) + size;
}

static inline char *put_frame(char *to, const Around *around, const Framed *one)
{
    size_t head = head_size(around, one);
    to = put(PUT(to, "HPUB "), around->target.data, around->target.size);
    to = put_numbered(PUT(to, " "), &around->reply, one);
    to = put_number(PUT(to, " "), head);
    to = put_number(PUT(to, " "), head + one->payload.size);
    to = put(PUT(to, "\r\nNATS/1.0\r\nNats-Msg-Id: "), one->id.data, one->id.size);
    to = put(PUT(to, "\r\ntraceparent: "), one->trace.data, one->trace.size);
    to = PUT(put_numbered(PUT(to, "\r\n"), &around->extra, one), "\r\n");
    return PUT(put(to, one->payload.data, one->payload.size), "\r\n");
}

/* 0 when the message (an Outgoing, whose fields stand at `at`) needs a closer look. */
static int read_framed(PyObject *message, const Py_ssize_t at[], const Ascii *subject, Framed *to)
{
    PyObject *payload = field(message, at[1]);
    Ascii own, stream;
    if (!ascii_of(field(message, at[0]), &own) || !ascii_of(field(message, at[2]), &to->id)
        || !ascii_of(field(message, at[7]), &to->trace) || !ascii_of(field(message, at[4]), &stream) || stream.size
        || field(message, at[3]) != Py_None || field(message, at[5]) != Py_None || field(message, at[6]) != Py_None
        || payload == NULL || !PyBytes_Check(payload) || !to->id.size || !to->trace.size || !is_plain(&to->id)
        || !is_plain(&to->trace))
        return 0;
    to->payload = (Ascii){PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload)};
    return subject->size == own.size && memcmp(subject->data, own.data, own.size) == 0;
}

static PyObject *piece_of(const Around *around, const Framed *all, Py_ssize_t count)
{
    size_t size = 0;
    for (Py_ssize_t n = 0; n < count; n++)
        size += frame_size(around, &all[n]);
    PyObject *piece = PyBytes_FromStringAndSize(NULL, size);
    if (piece == NULL)
        return NULL;
    char *to = PyBytes_AS_STRING(piece);
    for (Py_ssize_t n = 0; n < count; n++)
        to = put_frame(to, around, &all[n]);
    return piece;
}

PyDoc_STRVAR(frames_doc,
    "frames(messages, kind, target, first, extra, reply, step) -> (pieces, longest) | None\n\n"
    "The frames of messages (all of type `kind`, Outgoing) to one subject that carry an id and a trace and nothing else,\n"
    "`step` of them to a piece, and the size of the longest with its headers. `extra` (header lines) and `reply` are texts\n"
    "around the message's number, which counts from `first`: (before, behind in the first, between, in the last), or None.\n"
    "None when there is another message among them.");

static PyObject *frames(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    static const char *const names[] = {
        "subject", "payload", "msg_id", "headers", "expected_stream", "expected_last_sequence",
        "expected_last_subject_sequence", "traceparent",
    };
    Py_ssize_t at[8], step = 0, first = 0, longest = 0;
    Around around;
    Ascii subject;
    (void)module;
    if (nargs != 7 || !PyType_Check(args[1]) || !PyBytes_Check(args[2]) || (first = PyLong_AsSsize_t(args[3])) < 0
        || !read_numbered(args[4], &around.extra) || !read_numbered(args[5], &around.reply)
        || (step = PyLong_AsSsize_t(args[6])) < 1) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "frames(sequence, type, bytes, first, tuple, tuple, step)");
        return NULL;
    }
    PyObject *messages = PySequence_Fast(args[0], "messages must be a sequence");
    if (messages == NULL)
        return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(messages);
    PyObject *pieces = PyList_New(0);
    Framed *all = PyMem_New(Framed, count + 1);
    int is_failed = pieces == NULL || all == NULL;
    if (all == NULL)
        PyErr_NoMemory();
    around.target = (Ascii){PyBytes_AS_STRING(args[2]), PyBytes_GET_SIZE(args[2])};
    int is_odd = !count || !places_of(args[1], names, 8, at)
                 || !Py_IS_TYPE(PySequence_Fast_GET_ITEM(messages, 0), (PyTypeObject *)args[1])
                 || !ascii_of(field(PySequence_Fast_GET_ITEM(messages, 0), at[0]), &subject);
    for (Py_ssize_t n = 0; n < count && !is_odd && !is_failed; n++) {
        PyObject *one = PySequence_Fast_GET_ITEM(messages, n);
        all[n].number = first + n;
        all[n].which = n == count - 1 ? 2 : n != 0;
        is_odd = !Py_IS_TYPE(one, (PyTypeObject *)args[1]) || !read_framed(one, at, &subject, &all[n]);
        if (!is_odd) {
            Py_ssize_t size = head_size(&around, &all[n]) + all[n].payload.size;
            longest = size > longest ? size : longest;
        }
    }
    for (Py_ssize_t n = 0; n < count && !is_odd && !is_failed; n += step) {
        PyObject *piece = piece_of(&around, &all[n], count - n < step ? count - n : step);
        is_failed = piece == NULL || PyList_Append(pieces, piece) < 0;
        Py_XDECREF(piece);
    }
    PyMem_Free(all);
    Py_DECREF(messages);
    if (is_failed || is_odd) {
        Py_XDECREF(pieces);
        return is_failed ? NULL : Py_NewRef(Py_None);
    }
    return Py_BuildValue("Nn", pieces, longest);
}

/* ---- payloads */

#define FRACTION_MAX 1e15
#define LEVELS 5

static int reads_back(PyObject *value, int room)
{
    if (PyUnicode_CheckExact(value) || value == Py_None || PyBool_Check(value))
        return 1;
    if (PyLong_CheckExact(value)) {
        int is_beyond;
        (void)PyLong_AsLongLongAndOverflow(value, &is_beyond);
        return !is_beyond;
    }
    if (PyFloat_CheckExact(value))
        return PyFloat_AS_DOUBLE(value) >= -FRACTION_MAX && PyFloat_AS_DOUBLE(value) <= FRACTION_MAX;
    if (room == 0)
        return 0;
    if (PyDict_CheckExact(value)) {
        PyObject *name, *member;
        Py_ssize_t at = 0;
        while (PyDict_Next(value, &at, &name, &member))
            if (!PyUnicode_CheckExact(name) || !reads_back(member, room - 1))
                return 0;
        return 1;
    }
    if (PyList_CheckExact(value)) {
        for (Py_ssize_t n = 0; n < PyList_GET_SIZE(value); n++)
            if (!reads_back(PyList_GET_ITEM(value, n), room - 1))
                return 0;
        return 1;
    }
    return 0;
}

PyDoc_STRVAR(is_plain_doc,
    "is_plain(value) -> bool\n\n"
    "Whether a value is made of what reads back from JSON as it was: text, whole numbers and fractions within limits, and\n"
    "lists and objects of those, five inside each other. False: one must look closer.");

static PyObject *is_plain_value(PyObject *module, PyObject *value)
{
    (void)module;
    return PyBool_FromLong(reads_back(value, LEVELS));
}

/* ---- effects */

#define ID_CHARS 43
#define SPAN_CHARS 16
#define TRACE_ID_CHARS 32
#define TRACE_CHARS 55

/* What one effect is written from, all of it borrowed. */
typedef struct {
    PyObject *index, *subject, *stream, *ts;
    Ascii identity, cause_id, correlation, trace_id, payload, around[9];
} Caused;

typedef struct {
    PyTypeObject *plain, *input, *envelope;
    Py_ssize_t in_plain[6], in_input[2], in_envelope[4];
} Kinds;

/* 0 when one of its fields needs a closer look. */
static int read_caused(const Kinds *kinds, PyObject *effect, Caused *to)
{
    PyObject *cause, *envelope, *around, *follows, *payload;
    if (!Py_IS_TYPE(effect, kinds->plain) || !(cause = field(effect, kinds->in_plain[0]))
        || !Py_IS_TYPE(cause, kinds->input) || !(envelope = field(cause, kinds->in_input[1]))
        || !Py_IS_TYPE(envelope, kinds->envelope) || !(around = field(effect, kinds->in_plain[4]))
        || !PyTuple_CheckExact(around) || PyTuple_GET_SIZE(around) != 9)
        return 0;
    to->index = field(effect, kinds->in_plain[1]);
    to->subject = field(effect, kinds->in_plain[2]);
    to->stream = field(effect, kinds->in_plain[3]);
    to->ts = field(envelope, kinds->in_envelope[1]);
    follows = field(envelope, kinds->in_envelope[3]);
    for (int n = 0; n < 9; n++)
        if (!utf8_of(PyTuple_GET_ITEM(around, n), &to->around[n]))
            return 0;
    if (!ascii_of(field(cause, kinds->in_input[0]), &to->identity) || !is_plain(&to->identity)
        || !ascii_of(field(envelope, kinds->in_envelope[0]), &to->cause_id) || !is_plain(&to->cause_id)
        || !ascii_of(field(envelope, kinds->in_envelope[2]), &to->trace_id) || to->trace_id.size != TRACE_ID_CHARS
        || !(payload = field(effect, kinds->in_plain[5])) || !PyBytes_Check(payload) || !to->subject || !to->stream || !to->index
        || !PyLong_CheckExact(to->index) || !to->ts || !PyLong_CheckExact(to->ts))
        return 0;
    to->payload = (Ascii){PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload)};
    to->correlation = to->cause_id;
    return follows == Py_None || (ascii_of(follows, &to->correlation) && is_plain(&to->correlation));
}

/* What an id is hashed over: agent, input and place. */
static int append_named(Text *text, PyObject *begin, const Caused *from)
{
    return append(text, PyBytes_AS_STRING(begin), PyBytes_GET_SIZE(begin)) && APPEND(text, ",")
           && append_quoted(text, &from->identity) && APPEND(text, ",") && append_piece(text, from->index)
           && APPEND(text, "]");
}

/* `fx.` and forty digits of the hash. */
static void write_id(const unsigned char digest[SHA_BYTES], char id[ID_CHARS])
{
    static const char hex[] = "0123456789abcdef";
    memcpy(id, "fx.", 3);
    for (int n = 0; n < (ID_CHARS - 3) / 2; n++) {
        id[3 + 2 * n] = hex[digest[n] >> 4];
        id[4 + 2 * n] = hex[digest[n] & 15];
    }
}

static int write_body(Text *text, const Caused *from, const Ascii *id, const Ascii *span)
{
    const Ascii *around = from->around;
    text->size = 0;
    return append_ascii(text, &around[0]) && append_quoted(text, id)
           && append_ascii(text, &around[1]) && append_piece(text, from->ts)
           && append_ascii(text, &around[2]) && append_quoted(text, &from->trace_id)
           && append_ascii(text, &around[3]) && append_quoted(text, span)
           && append_ascii(text, &around[4]) && append_ascii(text, &from->payload)
           && append_ascii(text, &around[5]) && append_quoted(text, id)
           && append_ascii(text, &around[6]) && append_quoted(text, &from->cause_id)
           && append_ascii(text, &around[7]) && append_quoted(text, &from->correlation)
           && append_ascii(text, &around[8]);
}

static PyObject *make_caused(Text *text, const unsigned char *digest, PyObject *make, const Caused *from)
{
    char id[ID_CHARS], trace[TRACE_CHARS];
    write_id(digest, id);
    const Ascii own = {id, ID_CHARS}, span = {id + ID_CHARS - SPAN_CHARS, SPAN_CHARS};
    memcpy(trace, "00-", 3);
    memcpy(trace + 3, from->trace_id.data, TRACE_ID_CHARS);
    trace[3 + TRACE_ID_CHARS] = '-';
    memcpy(trace + 4 + TRACE_ID_CHARS, span.data, SPAN_CHARS);
    memcpy(trace + 4 + TRACE_ID_CHARS + SPAN_CHARS, "-01", 3);
    if (!write_body(text, from, &own, &span))
        return NULL;
    PyObject *parts[6] = {
        PyUnicode_FromStringAndSize(id, ID_CHARS), from->subject,
        PyBytes_FromStringAndSize((const char *)text->data, text->size), Py_None, from->stream,
        PyUnicode_FromStringAndSize(trace, TRACE_CHARS),
    };
    PyObject *made = NULL;
    if (parts[0] && parts[2] && parts[5])
        made = PyObject_Vectorcall(make, parts, 6, NULL);
    Py_XDECREF(parts[0]);
    Py_XDECREF(parts[2]);
    Py_XDECREF(parts[5]);
    return made;
}

/* 0 when one of the effects needs a closer look, or for want of memory. */
static int read_named(PyObject *effects, PyObject *begin, const Kinds *kinds, Parts *ids)
{
    Py_ssize_t count = PyList_GET_SIZE(effects);
    *ids = (Parts){{NULL, 0, 0}, PyMem_New(size_t, count + 1), count};
    int is_good = ids->ends != NULL;
    if (!is_good)
        PyErr_NoMemory();
    for (Py_ssize_t n = 0; is_good && n < count; n++) {
        Caused one;
        is_good = read_caused(kinds, PyList_GET_ITEM(effects, n), &one) && append_named(&ids->text, begin, &one);
        if (is_good)
            ids->ends[n] = ids->text.size;
    }
    if (!is_good)
        free_parts(ids);
    return is_good;
}

PyDoc_STRVAR(caused_doc,
    "caused(effects, begin, make, plain, input, envelope) -> list | None\n\n"
    "make(id, subject, body, None, stream, trace) for each effect (all of type `plain`, its cause of type `input`, that\n"
    "one's envelope of type `envelope`). None when one of them needs a closer look.");

static PyObject *caused(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    static const char *const in_plain[] = {"cause", "index", "subject", "stream", "around", "payload"};
    static const char *const in_input[] = {"identity", "envelope"};
    static const char *const in_envelope[] = {"id", "ts", "trace_id", "correlation_id"};
    Kinds kinds;
    (void)module;
    if (nargs != 6 || !PyList_CheckExact(args[0]) || !PyBytes_Check(args[1]) || !PyType_Check(args[3])
        || !PyType_Check(args[4]) || !PyType_Check(args[5])) {
        PyErr_SetString(PyExc_TypeError, "caused(list, bytes, callable, type, type, type)");
        return NULL;
    }
    kinds.plain = (PyTypeObject *)args[3];
    kinds.input = (PyTypeObject *)args[4];
    kinds.envelope = (PyTypeObject *)args[5];
    if (!places_of(args[3], in_plain, 6, kinds.in_plain) || !places_of(args[4], in_input, 2, kinds.in_input)
        || !places_of(args[5], in_envelope, 4, kinds.in_envelope))
        Py_RETURN_NONE;
    Parts ids;
    Caused one;
    if (!read_named(args[0], args[1], &kinds, &ids))
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    unsigned char *digests = PyMem_Malloc(ids.count * SHA_BYTES + 1);
    PyObject *found = digests ? PyList_New(ids.count) : PyErr_NoMemory();
    Text body = {NULL, 0, 0};
    if (found != NULL)
        sha_parts(&ids, digests);
    for (Py_ssize_t n = 0; found != NULL && n < ids.count; n++) {
        PyObject *made = NULL;
        if (read_caused(&kinds, PyList_GET_ITEM(args[0], n), &one))
            made = make_caused(&body, digests + n * SHA_BYTES, args[2], &one);
        else
            PyErr_SetString(PyExc_RuntimeError, "an effect has changed while it was written");
        if (made == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, n, made);
    }
    PyMem_Free(body.data);
    PyMem_Free(digests);
    free_parts(&ids);
    return found;
}

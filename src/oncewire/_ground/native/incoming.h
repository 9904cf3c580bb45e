/* What the server sends: deliveries to the Spark source, messages to the client, the places that replies name. */

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
            if (start[n] < 0 || end[n] < start[n] || end[n] > buffer.len || end[n] - start[n] > values.len - filled)
                break;
            int64_t size = end[n] - start[n];
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
    "make(stream, consumer, deliveries, sequence, timestamp_ns, reply) for each reply. None when one of them is not `begin`\n"
    "and five numbers joined by dots.");

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
        Bytes at = (Bytes)PyBytes_AS_STRING(reply) + begin_size;
        Bytes end = (Bytes)PyBytes_AS_STRING(reply) + PyBytes_GET_SIZE(reply);
        int64_t numbers[5];
        for (int m = 0; m < 5 && !is_odd; m++) {
            numbers[m] = number_at(&at, end, NUMBER_DIGITS_MAX);
            is_odd = numbers[m] < 0 || (m < 4 ? !takes(&at, end, '.') : at != end);
        }
        if (is_odd)
            break;
        if (numbers[0] != last_deliveries) {
            Py_XSETREF(deliveries, PyLong_FromLongLong(numbers[0]));
            last_deliveries = numbers[0];
        }
        PyObject *parts[6] = {
            args[3], args[4], deliveries, PyLong_FromLongLong(numbers[1]), PyLong_FromLongLong(numbers[3]), reply,
        };
        PyObject *made = NULL;
        if (deliveries && parts[3] && parts[4])
            made = PyObject_Vectorcall(args[2], parts, 6, NULL);
        Py_XDECREF(parts[3]);
        Py_XDECREF(parts[4]);
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

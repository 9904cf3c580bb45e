/* Complete envelopes of `evt.>` and `cmd.>`, spelled as our own encoder spells them: its order of the members, no blanks,
nothing that JSON escapes. Any other spelling is left to the twin. */

#define NAME_CHARS_MAX 256
#define ID_CHARS_MAX 512
#define BODY_BYTES_MAX (8 * 1024 * 1024 - 16 * 1024)
#define TS_DIGITS_MAX 15
#define TS_MS_MAX INT64_C(253402300799999)
#define TRACE_DIGITS 32
#define SPAN_DIGITS 16

/* The members in this order, which is that of `names`. */
enum {
    ID, TS, TYPE, SCHEMA_VERSION, TRACE_ID, SPAN_ID, TENANT, WORKSPACE, ACTOR, PAYLOAD, KEY, SOURCE, SECURITY_CONTEXT,
    CAUSATION_ID, CORRELATION_ID, MEMBERS
};

/* What the messages of one producer mostly have in common: made once as long as its text stays the same. */
typedef struct {
    Ascii text;
    PyObject *values[4];
} Common;

typedef struct {
    PyObject *actor, *source, *security_context, *version;
    PyObject *address;
    Common type, owner, rest; /* owner: tenant, workspace, actor; rest: what stands behind the key */
} Producer;

static inline int takes_text(Bytes *at, Bytes end, const char *text, Py_ssize_t size)
{
    if (end - *at < size || memcmp(*at, text, size) != 0)
        return 0;
    *at += size;
    return 1;
}

#define TAKES(at, end, constant) takes_text(at, end, constant, sizeof(constant) - 1)

/* A string with its quotes: at least one character, at most `most`, none of which JSON escapes. */
static inline int takes_string(Bytes *at, Bytes end, Py_ssize_t most, Ascii *found)
{
    if (!takes(at, end, '"'))
        return 0;
    Bytes p = *at;
    while (p < end && *p >= ' ' && *p <= '~' && *p != '"' && *p != '\\')
        p++;
    *found = (Ascii){(const char *)*at, p - *at};
    if (!found->size || found->size > most || !takes(&p, end, '"'))
        return 0;
    *at = p;
    return 1;
}

/* So many hexadecimal digits, lower case, not all of them zero, with the quotes. */
static inline int takes_digits(Bytes *at, Bytes end, Py_ssize_t count, Ascii *found)
{
    Bytes p = *at + 1;
    int any = 0, is_odd = 0;
    if (end - *at < count + 2 || **at != '"' || p[count] != '"')
        return 0;
    for (Py_ssize_t n = 0; n < count; n++) {
        is_odd |= !((unsigned)(p[n] - '0') <= 9 || (unsigned)(p[n] - 'a') <= 5);
        any |= p[n] != '0';
    }
    *found = (Ascii){(const char *)p, count};
    *at = p + count + 1;
    return any && !is_odd;
}

/* From a brace to the one that closes it. What stands between is for a decoder to judge; line breaks and other control
characters do not stand there. */
static int takes_object(Bytes *at, Bytes end, Ascii *found)
{
    Py_ssize_t depth = 0;
    int is_string = 0;
    if (*at == end || **at != '{')
        return 0;
    for (Bytes p = *at; p < end; p++) {
        unsigned char one = *p;
        if (one < ' ')
            return 0;
        if (is_string) {
            if (one == '\\') {
                if (++p == end || *p < ' ')
                    return 0;
            } else
                is_string = one != '"';
        } else if (one == '"')
            is_string = 1;
        else if (one == '{' || one == '[')
            depth++;
        else if ((one == '}' || one == ']') && --depth == 0) {
            *found = (Ascii){(const char *)*at, p + 1 - *at};
            *at = p + 1;
            return one == '}';
        }
    }
    return 0;
}

static inline PyObject *str_of(const Ascii *text)
{
    PyObject *made = PyUnicode_New(text->size, 127);
    if (made != NULL)
        memcpy(PyUnicode_1BYTE_DATA(made), text->data, text->size);
    return made;
}

static PyObject *pair_of(PyObject *make, const Ascii *first, const Ascii *second)
{
    PyObject *parts[2] = {str_of(first), str_of(second)}, *made = NULL;
    if (parts[0] && parts[1])
        made = PyObject_Vectorcall(make, parts, 2, NULL);
    Py_XDECREF(parts[0]);
    Py_XDECREF(parts[1]);
    return made;
}

static inline int is_same(const Ascii *one, const Ascii *other)
{
    return one->size == other->size && memcmp(one->data, other->data, one->size) == 0;
}

static inline int is_text(const Ascii *text, PyObject *str)
{
    Ascii other;
    return ascii_of(str, &other) && is_same(text, &other);
}

/* Takes the new values, all of which must be there. 0 after an error. */
static int remember(Common *common, Bytes from, Bytes to, PyObject *const values[], int count)
{
    int is_good = 1;
    for (int n = 0; n < count; n++) {
        Py_XSETREF(common->values[n], values[n]);
        is_good &= values[n] != NULL;
    }
    common->text = is_good ? (Ascii){(const char *)from, to - from} : (Ascii){NULL, 0};
    return is_good;
}

static inline void give(PyObject *row[], int member, PyObject *value)
{
    row[member] = Py_NewRef(value);
}

/* `,"tenant":…,"workspace":…,"actor":{…},"payload":`. 1, or 0 when it is spelled otherwise, or -1 after an error. */
static int takes_owner(Bytes *at, Bytes end, Producer *known, PyObject *address, PyObject *row[])
{
    Ascii tenant, workspace, id, role;
    Bytes from = *at;
    if (!(known->owner.text.size && known->address == address
          && takes_text(at, end, known->owner.text.data, known->owner.text.size))) {
        if (!(TAKES(at, end, ",\"tenant\":") && takes_string(at, end, ID_CHARS_MAX, &tenant)
              && TAKES(at, end, ",\"workspace\":") && takes_string(at, end, ID_CHARS_MAX, &workspace)
              && TAKES(at, end, ",\"actor\":{\"id\":") && takes_string(at, end, ID_CHARS_MAX, &id)
              && TAKES(at, end, ",\"role\":") && takes_string(at, end, NAME_CHARS_MAX, &role)
              && TAKES(at, end, "},\"payload\":")))
            return 0;
        if (!is_text(&tenant, PyTuple_GET_ITEM(address, 1)) || !is_text(&workspace, PyTuple_GET_ITEM(address, 2)))
            return 0;
        known->address = address;
        PyObject *const values[] = {
            Py_NewRef(PyTuple_GET_ITEM(address, 1)), Py_NewRef(PyTuple_GET_ITEM(address, 2)),
            pair_of(known->actor, &id, &role),
        };
        if (!remember(&known->owner, from, *at, values, 3))
            return -1;
    }
    give(row, TENANT, known->owner.values[0]);
    give(row, WORKSPACE, known->owner.values[1]);
    give(row, ACTOR, known->owner.values[2]);
    return 1;
}

static int is_principal_type(const Ascii *text)
{
    static const char *const types[] = {"service", "agent", "user", "system"};
    for (int n = 0; n < 4; n++)
        if ((size_t)text->size == strlen(types[n]) && memcmp(text->data, types[n], text->size) == 0)
            return 1;
    return 0;
}

static inline PyObject *str_or_none(const Ascii *text)
{
    return text->size ? str_of(text) : Py_NewRef(Py_None);
}

/* All that stands behind the key. Like `takes_owner`. */
static int takes_rest(Bytes *at, Bytes end, Producer *known, PyObject *row[])
{
    Ascii agent, adapter, id, type, causation = {NULL, 0}, correlation = {NULL, 0};
    Bytes from = *at;
    if (!(known->rest.text.size && known->rest.text.size == end - from && memcmp(from, known->rest.text.data, end - from) == 0)) {
        if (!(TAKES(at, end, ",\"source\":{\"agent\":") && takes_string(at, end, NAME_CHARS_MAX, &agent)
              && TAKES(at, end, ",\"adapter\":") && takes_string(at, end, NAME_CHARS_MAX, &adapter)
              && TAKES(at, end, "},\"security_context\":{\"principal_id\":") && takes_string(at, end, ID_CHARS_MAX, &id)
              && TAKES(at, end, ",\"principal_type\":") && takes_string(at, end, NAME_CHARS_MAX, &type)
              && TAKES(at, end, "}") && is_principal_type(&type)))
            return 0;
        if (TAKES(at, end, ",\"causation_id\":") && !takes_string(at, end, ID_CHARS_MAX, &causation))
            return 0;
        if (TAKES(at, end, ",\"correlation_id\":") && !takes_string(at, end, ID_CHARS_MAX, &correlation))
            return 0;
        if (!takes(at, end, '}') || *at != end)
            return 0;
        PyObject *const values[] = {
            pair_of(known->source, &agent, &adapter), pair_of(known->security_context, &id, &type),
            str_or_none(&causation), str_or_none(&correlation),
        };
        if (!remember(&known->rest, from, end, values, 4))
            return -1;
    }
    *at = end;
    for (int n = 0; n < 4; n++)
        give(row, SOURCE + n, known->rest.values[n]);
    return 1;
}

/* Reads a body into a row of members, but for its payload. 1, or 0 when it is spelled otherwise, or -1 after an error. */
static int read_envelope(Bytes at, Bytes end, Producer *known, PyObject *address, PyObject *row[], Ascii *payload)
{
    Ascii id, type, trace_id, span_id, key;
    int found;
    if (end - at > BODY_BYTES_MAX)
        return 0;
    if (!(TAKES(&at, end, "{\"id\":") && takes_string(&at, end, ID_CHARS_MAX, &id) && TAKES(&at, end, ",\"ts\":")))
        return 0;
    int is_zero = at < end && *at == '0';
    Bytes digits = at;
    int64_t ts = number_at(&at, end, TS_DIGITS_MAX);
    if (ts < 0 || ts > TS_MS_MAX || (is_zero && at - digits > 1))
        return 0;
    if (!(TAKES(&at, end, ",\"type\":") && takes_string(&at, end, NAME_CHARS_MAX, &type)
          && TAKES(&at, end, ",\"schema_version\":\"1.0\",\"trace_id\":") && takes_digits(&at, end, TRACE_DIGITS, &trace_id)
          && TAKES(&at, end, ",\"span_id\":") && takes_digits(&at, end, SPAN_DIGITS, &span_id)))
        return 0;
    if ((found = takes_owner(&at, end, known, address, row)) <= 0)
        return found;
    if (!(takes_object(&at, end, payload) && TAKES(&at, end, ",\"idempotency_key\":")
          && takes_string(&at, end, ID_CHARS_MAX, &key)))
        return 0;
    if ((found = takes_rest(&at, end, known, row)) <= 0)
        return found;
    if (!is_same(&type, &known->type.text)) {
        PyObject *const values[] = {str_of(&type)};
        if (!remember(&known->type, (Bytes)type.data, (Bytes)type.data + type.size, values, 1))
            return -1;
    }
    give(row, TYPE, known->type.values[0]);
    give(row, SCHEMA_VERSION, known->version);
    row[TS] = PyLong_FromLongLong(ts);
    row[ID] = str_of(&id);
    row[TRACE_ID] = str_of(&trace_id);
    row[SPAN_ID] = str_of(&span_id);
    row[KEY] = is_same(&key, &id) ? Py_XNewRef(row[ID]) : str_of(&key);
    return row[TS] && row[ID] && row[TRACE_ID] && row[SPAN_ID] && row[KEY] ? 1 : -1;
}

static void clear_row(PyObject *row[])
{
    for (int n = 0; n < MEMBERS; n++)
        Py_CLEAR(row[n]);
}

static void forget(Producer *known)
{
    Common *const all[] = {&known->type, &known->owner, &known->rest};
    for (int which = 0; which < 3; which++)
        for (int n = 0; n < 4; n++)
            Py_CLEAR(all[which]->values[n]);
}

/* The rows of those that are spelled as expected, each with its payload as a line of `lines`. 0 after an error. */
static int read_rows(PyObject *bodies, PyObject *addresses, Producer *known, PyObject **rows, Text *lines)
{
    for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(bodies); n++) {
        PyObject *body = PyTuple_GET_ITEM(bodies, n), *address = PyTuple_GET_ITEM(addresses, n);
        PyObject **row = rows + n * MEMBERS;
        Ascii payload;
        if (!PyBytes_Check(body) || !PyTuple_Check(address) || PyTuple_GET_SIZE(address) != 4) {
            PyErr_SetString(PyExc_TypeError, "bodies are bytes, addresses tuples of four");
            return 0;
        }
        Bytes at = (Bytes)PyBytes_AS_STRING(body);
        int found = read_envelope(at, at + PyBytes_GET_SIZE(body), known, address, row, &payload);
        if (found <= 0)
            clear_row(row);
        if (found < 0 || (found && !(append(lines, payload.data, payload.size) && APPEND(lines, "\n"))))
            return 0;
    }
    return 1;
}

/* make(**row) for each row that is there, None for the others, whose numbers go to `left`. 0 after an error. */
static int make_envelopes(PyObject **rows, PyObject *payloads, PyObject *make, PyObject *names, PyObject *made, PyObject *left)
{
    Py_ssize_t next = 0;
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(made); n++) {
        PyObject **row = rows + n * MEMBERS, *one = NULL;
        if (row[ID] != NULL) {
            if (next == PyList_GET_SIZE(payloads)) {
                PyErr_SetString(PyExc_ValueError, "less payloads than lines");
                return 0;
            }
            PyObject *payload = PyList_GET_ITEM(payloads, next++);
            if (payload != Py_None) {
                give(row, PAYLOAD, payload);
                one = PyObject_Vectorcall(make, row, 0, names);
                if (one == NULL)
                    return 0;
            }
        }
        PyList_SET_ITEM(made, n, one ? one : Py_NewRef(Py_None));
        if (one == NULL) {
            PyObject *number = PyLong_FromSsize_t(n);
            int is_failed = number == NULL || PyList_Append(left, number) < 0;
            Py_XDECREF(number);
            if (is_failed)
                return 0;
        }
    }
    return 1;
}

PyDoc_STRVAR(envelopes_doc,
    "envelopes(bodies, addresses, payloads_of, names, envelope, actor, source, security_context) -> (list, list)\n\n"
    "envelope(**members) for each body that is complete, belongs to its address and is spelled as our encoder spells it;\n"
    "None for the others, and the numbers of those. payloads_of(lines) reads the payloads, one in a line: an object each,\n"
    "or None where one must look closer.");

static PyObject *envelopes(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 8 || !PyTuple_CheckExact(args[3]) || PyTuple_GET_SIZE(args[3]) != MEMBERS) {
        PyErr_SetString(PyExc_TypeError, "envelopes(bodies, addresses, callable, names, type, type, type, type)");
        return NULL;
    }
    PyObject *bodies = PySequence_Tuple(args[0]), *addresses = PySequence_Tuple(args[1]), *found = NULL;
    PyObject *payloads = NULL, *made = NULL, *left = NULL, **rows = NULL, *text = NULL;
    Producer known = {.actor = args[5], .source = args[6], .security_context = args[7]};
    Text lines = {NULL, 0, 0};
    Py_ssize_t count = bodies ? PyTuple_GET_SIZE(bodies) : 0;
    if (bodies == NULL || addresses == NULL)
        goto done;
    if (PyTuple_GET_SIZE(addresses) != count) {
        PyErr_SetString(PyExc_ValueError, "as many addresses as bodies");
        goto done;
    }
    rows = PyMem_Calloc(count ? count * MEMBERS : 1, sizeof(PyObject *));
    if (rows == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    known.version = PyUnicode_InternFromString("1.0");
    if (known.version == NULL || !read_rows(bodies, addresses, &known, rows, &lines))
        goto done;
    text = PyBytes_FromStringAndSize((const char *)lines.data, lines.size);
    payloads = text ? PyObject_CallOneArg(args[2], text) : NULL;
    if (payloads == NULL)
        goto done;
    if (!PyList_CheckExact(payloads)) {
        PyErr_SetString(PyExc_TypeError, "payloads come as a list");
        goto done;
    }
    made = PyList_New(count);
    left = PyList_New(0);
    if (made && left && make_envelopes(rows, payloads, args[4], args[3], made, left))
        found = PyTuple_Pack(2, made, left);
done:
    for (Py_ssize_t n = 0; rows && n < count; n++)
        clear_row(rows + n * MEMBERS);
    PyMem_Free(rows);
    PyMem_Free(lines.data);
    forget(&known);
    Py_XDECREF(known.version);
    Py_XDECREF(text);
    Py_XDECREF(payloads);
    Py_XDECREF(made);
    Py_XDECREF(left);
    Py_XDECREF(bodies);
    Py_XDECREF(addresses);
    return found;
}

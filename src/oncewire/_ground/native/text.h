/* Text that grows, and what may be appended to it. */

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
    PyErr_SetString(PyExc_TypeError, "a piece is bytes, text or a whole number");
    return 0;
}

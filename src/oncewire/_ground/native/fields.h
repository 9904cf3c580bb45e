/* Fields of many objects of one Struct type, read at their places in memory. */

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

PyDoc_STRVAR(columns_doc,
    "columns(objects, type, names) -> list of lists | None\n\n"
    "By name what the fields of the objects hold. None when one of them is not of just that type, or holds nothing there.");

#define NAMES_MAX 16

static PyObject *columns(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    const char *names[NAMES_MAX];
    Py_ssize_t places[NAMES_MAX];
    (void)module;
    if (nargs != 3 || !PyType_Check(args[1]) || !PyTuple_CheckExact(args[2]) || PyTuple_GET_SIZE(args[2]) > NAMES_MAX) {
        PyErr_SetString(PyExc_TypeError, "columns(objects, type, up to 16 names)");
        return NULL;
    }
    int wanted = (int)PyTuple_GET_SIZE(args[2]);
    for (int n = 0; n < wanted; n++)
        if ((names[n] = PyUnicode_AsUTF8(PyTuple_GET_ITEM(args[2], n))) == NULL)
            return NULL;
    PyObject *objects = PySequence_Fast(args[0], "objects must be a sequence"), *found = NULL;
    if (objects == NULL)
        return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(objects);
    int is_odd = !places_of(args[1], names, wanted, places);
    for (Py_ssize_t at = 0; at < count && !is_odd; at++)
        is_odd = !Py_IS_TYPE(PySequence_Fast_GET_ITEM(objects, at), (PyTypeObject *)args[1]);
    if (!is_odd)
        found = PyList_New(wanted);
    for (int n = 0; n < wanted && found != NULL && !is_odd; n++) {
        PyObject *column = PyList_New(count);
        if (column == NULL) {
            Py_CLEAR(found);
            break;
        }
        PyList_SET_ITEM(found, n, column);
        for (Py_ssize_t at = 0; at < count && !is_odd; at++) {
            PyObject *value = field(PySequence_Fast_GET_ITEM(objects, at), places[n]);
            is_odd = value == NULL;
            PyList_SET_ITEM(column, at, Py_XNewRef(value));
        }
    }
    Py_DECREF(objects);
    if (is_odd) {
        Py_XDECREF(found);
        Py_RETURN_NONE;
    }
    return found;
}

/* The loops over every message that cost most in Python: frames of the NATS protocol, and hashes.

Each function has a twin in Python that gives the same; tests hold the two against each other. Nothing here decides
anything: whatever is unusual is left to the twin, by stopping in front of it or by returning None.

No function keeps anything between calls, and none writes outside of what it allocated or was handed to fill. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read lowest byte first"
#endif

#include "lines.h"
#include "text.h"
#include "fields.h"

#include "hashes.h"
#include "incoming.h"
#include "outgoing.h"
#include "envelopes.h"

static PyMethodDef methods[] = {
    {"caused", (PyCFunction)(void (*)(void))caused, METH_FASTCALL, caused_doc},
    {"columns", (PyCFunction)(void (*)(void))columns, METH_FASTCALL, columns_doc},
    {"envelopes", (PyCFunction)(void (*)(void))envelopes, METH_FASTCALL, envelopes_doc},
    {"frames", (PyCFunction)(void (*)(void))frames, METH_FASTCALL, frames_doc},
    {"replies", (PyCFunction)(void (*)(void))replies, METH_FASTCALL, replies_doc},
    {"blake2b_all", blake2b_all, METH_VARARGS, blake2b_all_doc},
    {"blake2b_sum", blake2b_sum, METH_VARARGS, blake2b_sum_doc},
    {"deliveries", deliveries, METH_VARARGS, deliveries_doc},
    {"gather", gather, METH_VARARGS, gather_doc},
    {"is_plain", is_plain_value, METH_O, is_plain_doc},
    {"messages", (PyCFunction)(void (*)(void))messages, METH_FASTCALL, messages_doc},
    {"sha256_all", sha256_all, METH_VARARGS, sha256_all_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "oncewire._ground.native.core", .m_size = 0, .m_methods = methods,
};

PyMODINIT_FUNC PyInit_core(void)
{
    return PyModuleDef_Init(&module);
}

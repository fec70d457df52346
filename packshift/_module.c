/* What Python sees of the C here: `packshift._compiled`, described in _compiled.pyi. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <sys/resource.h>
#include <unistd.h>

#include "_compiling.h"
#include "_gathering.h"
#include "_resampling.h"

static PyTypeObject rows_type, gathering_type, queue_type;

/* Rows of equal length in memory. `table` keeps them there. */
typedef struct {
    PyObject_HEAD
    Py_buffer table;
} Rows;

/* One batch of them. `out` keeps the memory that it is copied to. */
typedef struct {
    PyObject_VAR_HEAD
    struct batch batch;
    Rows *rows;
    Py_buffer out;
    int64_t positions[];
} Gathering;

/* `held` are the Gatherings that were handed over and not finished. */
typedef struct {
    PyObject_HEAD
    struct queue *queue;
    PyObject *held;
    PyObject *weak_references;
    pid_t owner;
} Queue;

/* --- rows ------------------------------------------------------------------------------------------------------------- */

static PyObject *rows_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    PyObject *table;
    if (keywords != NULL && PyDict_GET_SIZE(keywords) > 0) {
        PyErr_SetString(PyExc_TypeError, "Rows takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(arguments, "O:Rows", &table))
        return NULL;
    Rows *self = (Rows *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (PyObject_GetBuffer(table, &self->table, PyBUF_STRIDES) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    const Py_buffer *view = &self->table;
    if (view->ndim != 2 || view->itemsize != 1) {
        PyErr_Format(PyExc_ValueError, "expected rows of bytes, got %d dimensions of %zd bytes", view->ndim, view->itemsize);
        Py_DECREF(self);
        return NULL;
    }
    if (view->shape[1] > 0 && (view->strides[1] != 1 || view->strides[0] < view->shape[1])) {
        PyErr_Format(
            PyExc_ValueError, "expected rows in one piece each, got %zd and %zd bytes from element to element",
            view->strides[0], view->strides[1]);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void rows_dealloc(Rows *self)
{
    PyBuffer_Release(&self->table);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Position number `place`, if it is one of `length`. */
static int put_position(Gathering *gathering, Py_ssize_t place, int64_t position, int64_t length)
{
    if (position < 0 || position >= length) {
        PyErr_Format(
            PyExc_IndexError, "expected positions from 0 to %lld, got %lld", (long long)length - 1, (long long)position);
        return 0;
    }
    gathering->positions[place] = position;
    return 1;
}

static int put_list(Gathering *gathering, PyObject *list, int64_t length)
{
    if (PyList_GET_SIZE(list) != Py_SIZE(gathering)) {
        PyErr_SetString(PyExc_RuntimeError, "the list of positions has changed meanwhile");
        return 0;
    }
    for (Py_ssize_t place = 0; place < Py_SIZE(gathering); place++) {
        PyObject *item = PyList_GET_ITEM(list, place);
        if (!PyLong_CheckExact(item)) {
            PyErr_Format(PyExc_TypeError, "expected positions that are int, got %.100s", Py_TYPE(item)->tp_name);
            return 0;
        }
        int too_long; /* then it gives -1, which is no position either */
        if (!put_position(gathering, place, PyLong_AsLongLongAndOverflow(item, &too_long), length))
            return 0;
    }
    return 1;
}

static int is_int64(const Py_buffer *view)
{
    const char *format = view->format == NULL ? "B" : view->format;
    format += *format == '=' || *format == '@' || (*format == '<' && PY_LITTLE_ENDIAN);
    return view->itemsize == 8 && (strcmp(format, "l") == 0 || strcmp(format, "q") == 0);
}

static Gathering *new_gathering(Rows *rows, PyObject *out, Py_ssize_t count)
{
    Gathering *self = PyObject_NewVar(Gathering, &gathering_type, count);
    if (self == NULL)
        return NULL;
    self->rows = (Rows *)Py_NewRef(rows);
    self->out.obj = NULL;
    if (PyObject_GetBuffer(out, &self->out, PyBUF_WRITABLE) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    const Py_buffer *table = &rows->table;
    if (self->out.len != count * table->shape[1]) {
        PyErr_Format(
            PyExc_ValueError, "expected room for %zd of %zd bytes, got %zd bytes", count, table->shape[1], self->out.len);
        Py_DECREF(self);
        return NULL;
    }
    self->batch = (struct batch){
        .first = table->buf,
        .stride = (size_t)table->strides[0],
        .n = (size_t)table->shape[1],
        .positions = self->positions,
        .count = (size_t)count,
        .out = self->out.buf,
    };
    return self;
}

/* An array of int64; `view` is released by this. */
static PyObject *gathering_of_array(Rows *rows, Py_buffer *view, PyObject *out)
{
    Gathering *gathering = NULL;
    if (view->ndim != 1 || !is_int64(view))
        PyErr_SetString(PyExc_TypeError, "expected positions as a list of int or as int64 (B,)");
    else if ((gathering = new_gathering(rows, out, view->shape[0])) != NULL) {
        const int64_t *positions = view->buf;
        for (Py_ssize_t place = 0; place < view->shape[0]; place++)
            if (!put_position(gathering, place, positions[place], rows->table.shape[0])) {
                Py_CLEAR(gathering);
                break;
            }
    }
    PyBuffer_Release(view);
    return (PyObject *)gathering;
}

static PyObject *rows_gathering(Rows *self, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_Format(PyExc_TypeError, "gathering takes positions and where to copy to, got %zd arguments", count);
        return NULL;
    }
    if (!PyList_CheckExact(arguments[0])) {
        Py_buffer view;
        if (PyObject_GetBuffer(arguments[0], &view, PyBUF_FORMAT | PyBUF_ND) < 0)
            return NULL;
        return gathering_of_array(self, &view, arguments[1]);
    }
    Gathering *gathering = new_gathering(self, arguments[1], PyList_GET_SIZE(arguments[0]));
    if (gathering != NULL && !put_list(gathering, arguments[0], self->table.shape[0]))
        Py_CLEAR(gathering);
    return (PyObject *)gathering;
}

static PyMethodDef rows_methods[] = {
    {"gathering", (PyCFunction)(void (*)(void))rows_gathering, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject rows_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "packshift._compiled.Rows",
    .tp_basicsize = sizeof(Rows),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = rows_new,
    .tp_dealloc = (destructor)rows_dealloc,
    .tp_methods = rows_methods,
};

/* --- batches ---------------------------------------------------------------------------------------------------------- */

static void gathering_dealloc(Gathering *self)
{
    PyBuffer_Release(&self->out);
    Py_DECREF(self->rows);
    PyObject_Free(self);
}

static void run_here(Gathering *self, size_t threads)
{
    Py_BEGIN_ALLOW_THREADS
    self->batch.begun = 0;
    gather(&self->batch, threads);
    Py_END_ALLOW_THREADS
}

static PyObject *gathering_run(Gathering *self, PyObject *threads)
{
    size_t wanted = PyLong_AsSize_t(threads);
    if (wanted == (size_t)-1 && PyErr_Occurred())
        return NULL;
    run_here(self, wanted);
    Py_RETURN_NONE;
}

static PyObject *gathering_pick(Gathering *self, PyObject *values)
{
    Py_buffer view;
    if (PyObject_GetBuffer(values, &view, PyBUF_FORMAT | PyBUF_ND) < 0)
        return NULL;
    PyObject *picked = NULL;
    if (view.ndim != 1 || !is_int64(&view) || view.shape[0] != self->rows->table.shape[0])
        PyErr_Format(PyExc_ValueError, "expected int64 (%zd,)", self->rows->table.shape[0]);
    else
        picked = PyByteArray_FromStringAndSize(NULL, Py_SIZE(self) * (Py_ssize_t)sizeof(int64_t));
    if (picked != NULL) {
        const int64_t *from = view.buf;
        char *to = PyByteArray_AS_STRING(picked);
        for (Py_ssize_t place = 0; place < Py_SIZE(self); place++)
            memcpy(to + place * (Py_ssize_t)sizeof(int64_t), &from[self->positions[place]], sizeof(int64_t));
    }
    PyBuffer_Release(&view);
    return picked;
}

static PyObject *gathering_positions(Gathering *self, void *none)
{
    (void)none;
    return PyBytes_FromStringAndSize((const char *)self->positions, Py_SIZE(self) * (Py_ssize_t)sizeof(int64_t));
}

static PyObject *gathering_begun(Gathering *self, void *none)
{
    (void)none;
    size_t begun = atomic_load(&self->batch.begun);
    return PyLong_FromSize_t(begun < self->batch.count ? begun : self->batch.count);
}

static Py_ssize_t gathering_length(Gathering *self)
{
    return Py_SIZE(self);
}

static PyMethodDef gathering_methods[] = {
    {"run", (PyCFunction)gathering_run, METH_O, NULL},
    {"pick", (PyCFunction)gathering_pick, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef gathering_properties[] = {
    {"positions", (getter)gathering_positions, NULL, NULL, NULL},
    {"begun", (getter)gathering_begun, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PySequenceMethods gathering_as_sequence = {.sq_length = (lenfunc)gathering_length};

static PyTypeObject gathering_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "packshift._compiled.Gathering",
    .tp_basicsize = sizeof(Gathering),
    .tp_itemsize = sizeof(int64_t),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)gathering_dealloc,
    .tp_methods = gathering_methods,
    .tp_getset = gathering_properties,
    .tp_as_sequence = &gathering_as_sequence,
};

/* --- queues ----------------------------------------------------------------------------------------------------------- */

static PyObject *queue_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    Py_ssize_t threads;
    if (keywords != NULL && PyDict_GET_SIZE(keywords) > 0) {
        PyErr_SetString(PyExc_TypeError, "Queue takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(arguments, "n:Queue", &threads))
        return NULL;
    if (threads < 0)
        return PyErr_Format(PyExc_ValueError, "expected a number of threads, got %zd", threads);
    Queue *self = (Queue *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->owner = getpid();
    self->held = PySet_New(NULL);
    self->queue = self->held == NULL ? NULL : open_queue((size_t)threads);
    if (self->queue == NULL) {
        if (self->held != NULL)
            PyErr_NoMemory();
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* A child that was forked meanwhile has no such threads, and who knows what they were doing. */
static int is_inherited(const Queue *self)
{
    return getpid() != self->owner;
}

static void close_queue(Queue *self)
{
    Py_BEGIN_ALLOW_THREADS
    end_threads(self->queue);
    Py_END_ALLOW_THREADS
}

static void queue_dealloc(Queue *self)
{
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    if (self->queue != NULL && !is_inherited(self)) {
        close_queue(self);
        free_queue(self->queue);
    }
    Py_CLEAR(self->held);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int expect_gathering(PyObject *object)
{
    if (Py_IS_TYPE(object, &gathering_type))
        return 1;
    PyErr_Format(PyExc_TypeError, "expected a Gathering, got %.100s", Py_TYPE(object)->tp_name);
    return 0;
}

static PyObject *queue_hand_over(Queue *self, PyObject *gathering)
{
    if (!expect_gathering(gathering))
        return NULL;
    if (is_inherited(self))
        Py_RETURN_NONE;
    int held = PySet_Contains(self->held, gathering);
    if (held < 0)
        return NULL;
    if (held)
        return PyErr_Format(PyExc_ValueError, "this batch was handed over before");
    if (PySet_Add(self->held, gathering) < 0)
        return NULL;
    hand_over(self->queue, &((Gathering *)gathering)->batch);
    Py_RETURN_NONE;
}

static PyObject *queue_finish(Queue *self, PyObject *object)
{
    if (!expect_gathering(object))
        return NULL;
    Gathering *gathering = (Gathering *)object;
    if (is_inherited(self))
        run_here(gathering, 1);
    else if (!is_there(self->queue, &gathering->batch)) {
        Py_BEGIN_ALLOW_THREADS
        finish(self->queue, &gathering->batch);
        Py_END_ALLOW_THREADS
    }
    if (PySet_Discard(self->held, object) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *queue_close(Queue *self, PyObject *none)
{
    (void)none;
    if (!is_inherited(self))
        close_queue(self);
    Py_RETURN_NONE;
}

static PyObject *queue_is_inherited(Queue *self, void *none)
{
    (void)none;
    return PyBool_FromLong(is_inherited(self));
}

static PyObject *queue_waiting(Queue *self, void *none)
{
    (void)none;
    return PyLong_FromSize_t(is_inherited(self) ? 0 : waiting(self->queue));
}

static PyMethodDef queue_methods[] = {
    {"hand_over", (PyCFunction)queue_hand_over, METH_O, NULL},
    {"finish", (PyCFunction)queue_finish, METH_O, NULL},
    {"close", (PyCFunction)queue_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef queue_properties[] = {
    {"is_inherited", (getter)queue_is_inherited, NULL, NULL, NULL},
    {"waiting", (getter)queue_waiting, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject queue_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "packshift._compiled.Queue",
    .tp_basicsize = sizeof(Queue),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = queue_new,
    .tp_dealloc = (destructor)queue_dealloc,
    .tp_weaklistoffset = offsetof(Queue, weak_references),
    .tp_methods = queue_methods,
    .tp_getset = queue_properties,
};

/* --- functions -------------------------------------------------------------------------------------------------------- */

static int read_side(PyObject *tuple, struct side *side)
{
    return PyArg_ParseTuple(
        tuple, "ddiiiip", &side->start, &side->stop, &side->length, &side->size, &side->first, &side->last,
        &side->mirrored);
}

static PyObject *module_resample(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer picture, out;
    PyObject *sides[2];
    int sideways, turned;
    if (!PyArg_ParseTuple(
            arguments, "y*O!O!ppw*:resample", &picture, &PyTuple_Type, &sides[0], &PyTuple_Type, &sides[1], &sideways,
            &turned, &out))
        return NULL;
    struct side height, width;
    PyObject *result = NULL;
    if (read_side(sides[0], &height) && read_side(sides[1], &width)) {
        Py_ssize_t pixels = (Py_ssize_t)height.length * width.length;
        Py_ssize_t wanted = ((Py_ssize_t)height.last - height.first) * ((Py_ssize_t)width.last - width.first);
        if (picture.len != 4 * pixels || out.len != 3 * wanted)
            PyErr_Format(
                PyExc_ValueError, "expected %zd and %zd bytes, got %zd and %zd", 4 * pixels, 3 * wanted, picture.len,
                out.len);
        else {
            int done;
            Py_BEGIN_ALLOW_THREADS
            done = resample(picture.buf, &height, &width, sideways, turned, out.buf);
            Py_END_ALLOW_THREADS
            result = done ? Py_NewRef(Py_None) : PyErr_NoMemory();
        }
    }
    PyBuffer_Release(&picture);
    PyBuffer_Release(&out);
    return result;
}

static PyObject *module_major_faults(PyObject *module, PyObject *none)
{
    (void)module;
    (void)none;
    struct rusage usage;
    if (getrusage(RUSAGE_SELF, &usage) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    return PyLong_FromLong(usage.ru_majflt);
}

static PyMethodDef functions[] = {
    {"resample", module_resample, METH_VARARGS, NULL},
    {"major_faults", module_major_faults, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "packshift._compiled",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__compiled(void)
{
    if (PyType_Ready(&rows_type) < 0 || PyType_Ready(&gathering_type) < 0 || PyType_Ready(&queue_type) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    if (PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0 ||
        PyModule_AddObjectRef(module, "Rows", (PyObject *)&rows_type) < 0 ||
        PyModule_AddObjectRef(module, "Gathering", (PyObject *)&gathering_type) < 0 ||
        PyModule_AddObjectRef(module, "Queue", (PyObject *)&queue_type) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}

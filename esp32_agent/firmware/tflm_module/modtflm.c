// MicroPython's module `tflm`:
//
//     model = tflm.Model(data, arena_bytes, psram)   data: the .tflite file, aligned to 16 as MicroPython's heap is
//     model.set_input(data); model.invoke(); model.output()
//     model.input_bytes, model.output_bytes, model.arena_used
//
// ValueError for a model that cannot be loaded or an input of another size, RuntimeError for an inference that failed.
#include <string.h>

#include "py/obj.h"
#include "py/objstr.h"
#include "py/runtime.h"

#include "tflm_engine.h"

typedef struct _model_obj_t {
    mp_obj_base_t base;
    mp_obj_t data; // keeps the model's bytes alive
    tflm_engine_t *engine;
} model_obj_t;

static tflm_engine_t *engine_of(model_obj_t *self) {
    if (self->engine == NULL) {
        mp_raise_ValueError(MP_ERROR_TEXT("the model is closed"));
    }
    return self->engine;
}

static mp_obj_t model_make_new(const mp_obj_type_t *type, size_t n_args, size_t n_kw, const mp_obj_t *args) {
    mp_arg_check_num(n_args, n_kw, 3, 3, false);
    mp_buffer_info_t data;
    mp_get_buffer_raise(args[0], &data, MP_BUFFER_READ);
    const mp_int_t arena_bytes = mp_obj_get_int(args[1]);
    if (arena_bytes <= 0) {
        mp_raise_ValueError(MP_ERROR_TEXT("arena_bytes must be positive"));
    }
    model_obj_t *self = mp_obj_malloc_with_finaliser(model_obj_t, type);
    self->data = args[0];
    self->engine = NULL;
    const char *error = NULL;
    self->engine = tflm_engine_new(data.buf, data.len, (size_t)arena_bytes, mp_obj_is_true(args[2]), &error);
    if (self->engine == NULL) {
        mp_raise_msg_varg(&mp_type_ValueError, MP_ERROR_TEXT("%s"), error);
    }
    return MP_OBJ_FROM_PTR(self);
}

static mp_obj_t model_set_input(mp_obj_t self_in, mp_obj_t data_in) {
    mp_buffer_info_t data;
    mp_get_buffer_raise(data_in, &data, MP_BUFFER_READ);
    size_t bytes;
    int8_t *tensor = tflm_engine_input(engine_of(MP_OBJ_TO_PTR(self_in)), &bytes);
    if (data.len != bytes) {
        mp_raise_msg_varg(&mp_type_ValueError, MP_ERROR_TEXT("the input has %u bytes and not %u"), (unsigned)data.len,
            (unsigned)bytes);
    }
    memcpy(tensor, data.buf, bytes);
    return mp_const_none;
}
static MP_DEFINE_CONST_FUN_OBJ_2(model_set_input_obj, model_set_input);

static mp_obj_t model_invoke(mp_obj_t self_in) {
    tflm_engine_t *engine = engine_of(MP_OBJ_TO_PTR(self_in));
    MP_THREAD_GIL_EXIT();
    const int failed = tflm_engine_invoke(engine);
    MP_THREAD_GIL_ENTER();
    if (failed) {
        mp_raise_msg(&mp_type_RuntimeError, MP_ERROR_TEXT("an operator failed"));
    }
    return mp_const_none;
}
static MP_DEFINE_CONST_FUN_OBJ_1(model_invoke_obj, model_invoke);

static mp_obj_t model_output(mp_obj_t self_in) {
    size_t bytes;
    const int8_t *tensor = tflm_engine_output(engine_of(MP_OBJ_TO_PTR(self_in)), &bytes);
    return mp_obj_new_bytes((const byte *)tensor, bytes);
}
static MP_DEFINE_CONST_FUN_OBJ_1(model_output_obj, model_output);

static mp_obj_t model_close(mp_obj_t self_in) {
    model_obj_t *self = MP_OBJ_TO_PTR(self_in);
    if (self->engine != NULL) {
        tflm_engine_delete(self->engine);
        self->engine = NULL;
        self->data = mp_const_none;
    }
    return mp_const_none;
}
static MP_DEFINE_CONST_FUN_OBJ_1(model_close_obj, model_close);

static void model_attr(mp_obj_t self_in, qstr attribute, mp_obj_t *destination) {
    if (destination[0] != MP_OBJ_NULL) {
        return; // nothing can be set
    }
    model_obj_t *self = MP_OBJ_TO_PTR(self_in);
    size_t bytes = 0;
    if (attribute == MP_QSTR_input_bytes) {
        tflm_engine_input(engine_of(self), &bytes);
    } else if (attribute == MP_QSTR_output_bytes) {
        tflm_engine_output(engine_of(self), &bytes);
    } else if (attribute == MP_QSTR_arena_used) {
        bytes = tflm_engine_arena_used(engine_of(self));
    } else {
        destination[1] = MP_OBJ_SENTINEL; // look among the methods
        return;
    }
    destination[0] = mp_obj_new_int_from_uint(bytes);
}

static const mp_rom_map_elem_t model_locals_table[] = {
    { MP_ROM_QSTR(MP_QSTR_set_input), MP_ROM_PTR(&model_set_input_obj) },
    { MP_ROM_QSTR(MP_QSTR_invoke), MP_ROM_PTR(&model_invoke_obj) },
    { MP_ROM_QSTR(MP_QSTR_output), MP_ROM_PTR(&model_output_obj) },
    { MP_ROM_QSTR(MP_QSTR_close), MP_ROM_PTR(&model_close_obj) },
    { MP_ROM_QSTR(MP_QSTR___del__), MP_ROM_PTR(&model_close_obj) },
};
static MP_DEFINE_CONST_DICT(model_locals, model_locals_table);

static MP_DEFINE_CONST_OBJ_TYPE(
    model_type,
    MP_QSTR_Model,
    MP_TYPE_FLAG_NONE,
    make_new, model_make_new,
    attr, model_attr,
    locals_dict, &model_locals
    );

static MP_DEFINE_STR_OBJ(version_obj, "1");

static const mp_rom_map_elem_t tflm_globals_table[] = {
    { MP_ROM_QSTR(MP_QSTR___name__), MP_ROM_QSTR(MP_QSTR_tflm) },
    { MP_ROM_QSTR(MP_QSTR_VERSION), MP_ROM_PTR(&version_obj) },
    { MP_ROM_QSTR(MP_QSTR_Model), MP_ROM_PTR(&model_type) },
};
static MP_DEFINE_CONST_DICT(tflm_globals, tflm_globals_table);

const mp_obj_module_t tflm_module = {
    .base = { &mp_type_module },
    .globals = (mp_obj_dict_t *)&tflm_globals,
};

MP_REGISTER_MODULE(MP_QSTR_tflm, tflm_module);

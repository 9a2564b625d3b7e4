# For ports that build with make, unix among them:
#     make -C ports/unix USER_C_MODULES=<the folder above this one> TFLM=<tree>
# <tree> is what tflite-micro's tensorflow/lite/micro/tools/project_generation/create_tflm_tree.py writes, with
# libtensorflow-microlite.a built from it.
TFLM_MODULE_DIR := $(USERMOD_DIR)

SRC_USERMOD += $(TFLM_MODULE_DIR)/modtflm.c
SRC_USERMOD_LIB_CXX += $(TFLM_MODULE_DIR)/tflm_engine.cpp

TFLM_INCLUDES := -I$(TFLM) -I$(TFLM)/third_party/flatbuffers/include -I$(TFLM)/third_party/gemmlowp \
	-I$(TFLM)/third_party/ruy
CFLAGS_USERMOD += -I$(TFLM_MODULE_DIR)
CXXFLAGS_USERMOD += -I$(TFLM_MODULE_DIR) $(TFLM_INCLUDES) -std=c++17 -DTF_LITE_STATIC_MEMORY -fno-rtti -fno-exceptions
LDFLAGS_USERMOD += $(TFLM)/libtensorflow-microlite.a -lstdc++ -lm

# For the ESP32: make -C ports/esp32 USER_C_MODULES=<this folder>/micropython.cmake
# ports/esp32/main/idf_component.yml must name espressif/esp-tflite-micro, which brings ESP-NN with it.
add_library(usermod_tflm INTERFACE)

target_sources(usermod_tflm INTERFACE
    ${CMAKE_CURRENT_LIST_DIR}/modtflm.c
    ${CMAKE_CURRENT_LIST_DIR}/tflm_engine.cpp
)

target_include_directories(usermod_tflm INTERFACE ${CMAKE_CURRENT_LIST_DIR})

# The macros of the component: without them the headers describe other structures than the library has.
target_compile_definitions(usermod_tflm INTERFACE TF_LITE_STATIC_MEMORY ESP_NN)
target_compile_options(usermod_tflm INTERFACE -O2 $<$<COMPILE_LANGUAGE:CXX>:-fno-rtti> $<$<COMPILE_LANGUAGE:CXX>:-fno-exceptions>)

if(TARGET __idf_espressif__esp-tflite-micro)
    target_link_libraries(usermod_tflm INTERFACE __idf_espressif__esp-tflite-micro)
endif()

target_link_libraries(usermod INTERFACE usermod_tflm)

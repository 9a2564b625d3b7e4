"""A file that ik_llama.cpp's build calls and its source distribution lacks."""

BUILD_INFO = """\
file(WRITE "${CMAKE_CURRENT_LIST_DIR}/../build-info.cpp" [[
int LLAMA_BUILD_NUMBER = 0;
char const *LLAMA_COMMIT = "";
char const *LLAMA_COMPILER = "";
char const *LLAMA_BUILD_TARGET = "";
]])
"""
"""A CMake script that writes build-info.cpp: a build number of 0 and empty names, since there is no git checkout."""

// A request of the host: one flat JSON object in a line, such as {"id": 3, "do": "input", "offset": 0, "data": "00ff"}.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace optigpu {

struct Request {
    uint32_t id = 0;
    uint32_t offset = 0;
    uint32_t size = 0;
    uint32_t count = 0;
    uint32_t warmup = 0;
    char verb[16] = {};
    const char *data = "";  // hex digits, within the line
    size_t data_length = 0;
};

// Reads whole numbers and texts without escapes; other members are skipped. The line must outlive the request.
class RequestReader {
public:
    RequestReader(const char *line, size_t length) : at_(line), end_(line + length) {}

    // False for a line that is not such an object.
    bool Read(Request &request) {
        if (!Take('{')) {
            return false;
        }
        if (Take('}')) {
            return AtEnd();
        }
        do {
            if (!ReadMember(request)) {
                return false;
            }
        } while (Take(','));
        return Take('}') && AtEnd();
    }

private:
    bool ReadMember(Request &request) {
        const char *name;
        size_t name_length;
        if (!ReadText(name, name_length) || !Take(':')) {
            return false;
        }
        SkipSpace();
        if (at_ < end_ && *at_ == '"') {
            const char *text;
            size_t length;
            return ReadText(text, length) && SetText(request, name, name_length, text, length);
        }
        uint32_t number;
        return ReadNumber(number) && SetNumber(request, name, name_length, number);
    }

    static bool Is(const char *name, size_t length, const char *expected) {
        return length == std::strlen(expected) && std::memcmp(name, expected, length) == 0;
    }

    static bool SetText(Request &request, const char *name, size_t name_length, const char *text, size_t length) {
        if (Is(name, name_length, "do")) {
            if (length >= sizeof(request.verb)) {
                return false;
            }
            std::memcpy(request.verb, text, length);
            request.verb[length] = '\0';
        } else if (Is(name, name_length, "data")) {
            request.data = text;
            request.data_length = length;
        }
        return true;
    }

    static bool SetNumber(Request &request, const char *name, size_t length, uint32_t number) {
        if (Is(name, length, "id")) {
            request.id = number;
        } else if (Is(name, length, "offset")) {
            request.offset = number;
        } else if (Is(name, length, "size")) {
            request.size = number;
        } else if (Is(name, length, "count")) {
            request.count = number;
        } else if (Is(name, length, "warmup")) {
            request.warmup = number;
        }
        return true;
    }

    bool ReadText(const char *&text, size_t &length) {
        if (!Take('"')) {
            return false;
        }
        text = at_;
        while (at_ < end_ && *at_ != '"') {
            if (*at_ == '\\' || static_cast<unsigned char>(*at_) < 0x20) {
                return false;
            }
            ++at_;
        }
        length = static_cast<size_t>(at_ - text);
        return at_++ < end_;
    }

    bool ReadNumber(uint32_t &number) {
        uint64_t value = 0;
        const char *first = at_;
        while (at_ < end_ && *at_ >= '0' && *at_ <= '9') {
            value = value * 10 + static_cast<uint64_t>(*at_ - '0');
            if (value > UINT32_MAX) {
                return false;
            }
            ++at_;
        }
        number = static_cast<uint32_t>(value);
        return at_ > first;
    }

    bool Take(char expected) {
        SkipSpace();
        if (at_ >= end_ || *at_ != expected) {
            return false;
        }
        ++at_;
        return true;
    }

    bool AtEnd() {
        SkipSpace();
        return at_ >= end_;
    }

    void SkipSpace() {
        while (at_ < end_ && (*at_ == ' ' || *at_ == '\t')) {
            ++at_;
        }
    }

    const char *at_;
    const char *end_;
};

}  // namespace optigpu

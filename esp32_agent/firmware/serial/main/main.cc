// The ESP-IDF side: the embedded model on TFLite Micro with ESP-NN, and the console's serial port.
#include <cstring>

#include "driver/uart.h"
#include "esp_app_desc.h"
#include "esp_clk_tree.h"
#include "esp_heap_caps.h"
#include "esp_system.h"
#include "esp_timer.h"
#include "freertos/FreeRTOS.h"
#include "freertos/task.h"
#include "mbedtls/sha256.h"
#include "sdkconfig.h"

#include "session.h"
#include "tflm_engine.h"

extern const uint8_t model_start[] asm("_binary_model_tflite_start");
extern const uint8_t model_end[] asm("_binary_model_tflite_end");

namespace {

constexpr uart_port_t kUart = UART_NUM_0;
constexpr int kBaud = 921600;
constexpr int kReceiveBytes = 4096;

class EngineModel : public optigpu::Model {
public:
    explicit EngineModel(tflm_engine_t *engine) : engine_(engine) {
        tflm_engine_input(engine_, &input_bytes_);
        tflm_engine_output(engine_, &output_bytes_);
        input_ = static_cast<uint8_t *>(heap_caps_malloc_prefer(input_bytes_, 2, MALLOC_CAP_SPIRAM, MALLOC_CAP_8BIT));
        std::memset(input_, 0, input_bytes_);
    }

    size_t input_bytes() const override { return input_bytes_; }
    size_t output_bytes() const override { return output_bytes_; }
    uint8_t *input() override { return input_; }

    const uint8_t *output() const override {
        size_t bytes;
        return reinterpret_cast<const uint8_t *>(tflm_engine_output(engine_, &bytes));
    }

    const char *Invoke(uint64_t &us) override {
        size_t bytes;
        std::memcpy(tflm_engine_input(engine_, &bytes), input_, input_bytes_);
        const int64_t before = esp_timer_get_time();
        const int failed = tflm_engine_invoke(engine_);
        us = static_cast<uint64_t>(esp_timer_get_time() - before);
        return failed ? "An operator failed." : nullptr;
    }

private:
    tflm_engine_t *engine_;
    size_t input_bytes_ = 0;
    size_t output_bytes_ = 0;
    uint8_t *input_ = nullptr;
};

class UartPort : public optigpu::Port {
public:
    void Write(const char *text, size_t length) override { uart_write_bytes(kUart, text, length); }
    uint32_t HeapFree() const override { return esp_get_free_heap_size(); }
};

void Hex(const uint8_t (&digest)[32], char (&text)[65]) {
    for (int i = 0; i < 32; ++i) {
        std::snprintf(text + 2 * i, 3, "%02x", digest[i]);
    }
}

const char *ResetReason() {
    switch (esp_reset_reason()) {
        case ESP_RST_POWERON: return "power_on";
        case ESP_RST_BROWNOUT: return "brownout";
        case ESP_RST_DEEPSLEEP: return "deep_sleep";
        case ESP_RST_INT_WDT:
        case ESP_RST_TASK_WDT:
        case ESP_RST_WDT: return "watchdog";
        case ESP_RST_EXT:
        case ESP_RST_SW:
        case ESP_RST_PANIC: return "reset";
        default: return "unknown";
    }
}

uint32_t ClockHz() {
    uint32_t hz = 0;
    esp_clk_tree_src_get_freq_hz(SOC_MOD_CLK_CPU, ESP_CLK_TREE_SRC_FREQ_PRECISION_CACHED, &hz);
    return hz;
}

void OpenUart() {
    uart_config_t config = {};
    config.baud_rate = kBaud;
    config.data_bits = UART_DATA_8_BITS;
    config.parity = UART_PARITY_DISABLE;
    config.stop_bits = UART_STOP_BITS_1;
    config.flow_ctrl = UART_HW_FLOWCTRL_DISABLE;
    config.source_clk = UART_SCLK_DEFAULT;
    ESP_ERROR_CHECK(uart_driver_install(kUart, kReceiveBytes, 0, 0, nullptr, 0));
    ESP_ERROR_CHECK(uart_param_config(kUart, &config));
}

// A board whose model cannot run says why, again and again: the host may open the line later.
[[noreturn]] void Complain(UartPort &port, const char *reason) {
    while (true) {
        char line[160];
        const int length = std::snprintf(line, sizeof(line), "{\"id\":0,\"error\":\"%s\"}\n", reason);
        port.Write(line, static_cast<size_t>(length));
        vTaskDelay(pdMS_TO_TICKS(1000));
    }
}

optigpu::Description Describe() {
    static char model_sha256[65];
    static char firmware_sha256[65];
    uint8_t digest[32];
    mbedtls_sha256(model_start, static_cast<size_t>(model_end - model_start), digest, 0);
    Hex(digest, model_sha256);
    std::memcpy(digest, esp_app_get_description()->app_elf_sha256, sizeof(digest));
    Hex(digest, firmware_sha256);
#ifdef CONFIG_OPTIGPU_ARENA_PSRAM
    constexpr bool psram = true;
#else
    constexpr bool psram = false;
#endif
    return {"1", CONFIG_IDF_TARGET, ResetReason(), model_sha256, firmware_sha256, ClockHz(), CONFIG_OPTIGPU_ARENA_BYTES,
            psram};
}

}  // namespace

extern "C" void app_main() {
    OpenUart();
    static UartPort port;
    const optigpu::Description description = Describe();
    const char *error = nullptr;
    tflm_engine_t *engine = tflm_engine_new(model_start, static_cast<size_t>(model_end - model_start),
                                            description.arena_bytes, description.psram, &error);
    if (engine == nullptr) {
        Complain(port, error);
    }
    static EngineModel model(engine);
    static optigpu::Session session(model, port, description);
    session.Begin();
    while (true) {
        char byte;
        if (uart_read_bytes(kUart, &byte, 1, portMAX_DELAY) == 1) {
            session.Receive(byte);
        }
    }
}

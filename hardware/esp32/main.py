from esp32_agent.main import on_board

on_board()

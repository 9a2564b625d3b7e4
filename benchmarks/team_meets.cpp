// What it costs the decoder's own team of threads to meet, with nothing to do in between: threads.py calls it by ctypes.

#include <chrono>
#include <cstdint>

#include "../optigpu/ops/decode/cpu/team.h"

namespace {

struct Meetings {
  Team& team;
  int64_t count;
  double seconds;
};

void meet_often(void* context, int64_t id) {
  Meetings& meetings = *static_cast<Meetings*>(context);
  meetings.team.meet();  // all are awake
  const auto began = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < meetings.count; ++i) meetings.team.meet();
  if (id == 0) meetings.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

}  // namespace

// Seconds of `count` meetings of so many threads, each pinned to one of `cpus`.
extern "C" double optigpu_team_meets(int64_t threads, const int64_t* cpus, int64_t count) {
  Team team(std::vector<int64_t>(cpus, cpus + threads));
  Meetings meetings{team, count, 0};
  team.run(meet_often, &meetings);
  return meetings.seconds;
}

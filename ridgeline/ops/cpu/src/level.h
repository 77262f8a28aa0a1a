/* Every kernel file is compiled once per level of instructions, and its functions carry the level's name: the loader takes
   those of the best level that the processor has. `native_build.py` lists the levels and their flags. */

#ifndef RIDGELINE_LEVEL_H
#define RIDGELINE_LEVEL_H

#ifndef LEVEL
#define LEVEL base
#endif
#define RIDGELINE_JOINED(name, level) ridgeline_##name##_##level
#define RIDGELINE_NAMED(name, level) RIDGELINE_JOINED(name, level)
#define KERNEL(name) RIDGELINE_NAMED(name, LEVEL)

#endif

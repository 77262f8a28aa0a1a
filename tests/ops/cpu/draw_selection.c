/* A test program: selects among members in an order that makes every pivot the worst one, and compares with a walk in order.
   Arguments: how many members there are. Its caller limits the processor time. */

#include "../../../ridgeline/ops/cpu/src/step/draw.c"

#include <stdio.h>

/* Keys for which reaches() always takes the largest one left as its pivot: the places are followed through its own exchanges. */
static void worst_order(Member *members, int64_t count, int64_t *places) {
    for (int64_t i = 0; i < count; i++) places[i] = i;
    for (int64_t left = count; left > 1; left--) {
        const int64_t pivot = places[left / 2];
        members[pivot].key = (double)left;
        places[left / 2] = places[left - 1];
    }
    members[places[0]].key = 1.0;
}

int main(int count_of_arguments, char **arguments) {
    if (count_of_arguments != 2) return 2;
    const int64_t count = atoll(arguments[1]);
    Member *members = malloc((size_t)count * sizeof(Member));
    int64_t *places = malloc((size_t)count * sizeof(int64_t));
    for (int64_t wanted = 1; wanted <= 3; wanted++) {
        for (int64_t i = 0; i < count; i++) members[i] = (Member){0.0, 1.0, (int32_t)i};
        worst_order(members, count, places);
        const Member found = reaches(members, count, 10.0, 10.0 + (double)wanted);
        if (found.key != (double)wanted) return printf("%g instead of %g\n", found.key, (double)wanted), 1;
    }
    return 0;
}

#include "control.h"

int answer(void);
int answer(void) { return ANSWER; }

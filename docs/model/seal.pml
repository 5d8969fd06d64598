/*
 * Read safety: an owner whose pages are used again, readers that read them
 * from afar. Why it is right is told in docs/read-safety.md, what is and what
 * is not modelled in README.md beside this file.
 *
 * One d_step is one transition: what it does, nobody sees half done. What
 * another party can see happen in between is a transition of its own.
 *
 * -DM_... breaks one rule. scripts/model.sh has the list, runs everything,
 * and says what it expects.
 *
 * -DFORK -DRESET -DOFFLOAD -DTWO -DRANKS=2 -DLEASE -DREVOKE -DCRASH -DLOSS switch parts on.
 */
#ifndef NP
#define NP 2            /* pages of the owner, the same ones in every rank */
#endif
#ifndef NS
#define NS 2            /* streams at one time */
#endif
#ifndef NB
#define NB 2            /* pages that a stream can grow to: 1 or 2 */
#endif
#ifndef NT
#define NT 2            /* contents ever written: every stream and every reset is one */
#endif
#ifndef NG
#define NG 2            /* publications ever made: 1 to 3 */
#endif
#ifndef NR
#define NR 1            /* readers: 1 or 2 */
#endif
#ifndef TRIES
#define TRIES 1         /* attempts that a reader makes */
#endif
#ifndef RANKS
#define RANKS 1         /* ranks: 1 or 2, each with a memory of its own */
#endif
#ifndef SLOTS
#define SLOTS 2         /* seal words of the owner, for all ranks */
#endif
#define NOPS (NB*RANKS) /* data reads of one retrieval: page b of rank k is NB*k + b */
#define NONE 7

/* What a block of a stream's content is, and what a page holds that nobody wrote. */
#define BYTES(t,b) ((t)*2+(b))
#define JUNK 0

/* A seal word's value. */
#ifdef M_SEQUENCE_ALONE
#define SEAL(l,s) (s)
#else
#define SEAL(l,s) ((l)*4+(s))
#endif
/* The words of a life. Mutant: a new life has a fresh table, and who mapped the old one keeps it. */
#ifdef M_OLD_TABLE
#define WORDS (2*SLOTS)
#define AT(l,s) ((l)*SLOTS+(s))
#else
#define WORDS SLOTS
#define AT(l,s) (s)
#endif

/* Of a stream. A claimed one is being copied to the host. */
#define EMPTY 0
#define LIVE 1
#define CLAIMED 2
#define HOST 3
/* Of a publication: its end is decided (DUE), its word was changed (CLEARED), the manager was told (ENDED). */
#define UNMADE 0
#define HELD 1
#define DUE 2
#define CLEARED 3
#define ENDED 4
/* Of a reader. */
#define IDLE 0
#define READING 1
#define VALIDATING 2
#define LANDED 3
#define DRAINING 4
/* Of a read. */
#define NOREAD 0
#define POSTED 1
#define SERVED 2        /* the bytes left the owner */
#define DONE 3          /* they are in the reader's page */
#define DEAD 4          /* it will never be served */

typedef Stream {
  byte st; byte n; byte wr; byte wk;    /* pages; pages written, and ranks written of the next one */
  byte g;                               /* the publication that grows with it; 0: none */
  byte pg[NB]; byte val[NB];            /* its pages, and what they are to hold */
#ifdef FORK
  byte fn; byte fc; byte fp[NB];        /* a fork onto it: fresh pages, and how many are copied */
#endif
#ifdef OFFLOAD
  byte hc; byte host[NOPS];             /* pages copied to the host */
#endif
}
typedef Pub {                           /* pg, val, wm: as announced; readers know them for ever */
  byte st; byte slot; byte word; byte wm; byte pg[NB]; byte val[NB];
#ifdef LEASE
  byte lease;                           /* bit r: reader r */
#endif
}
typedef Reader {
  byte st; byte g; byte tries;
  byte stored; byte want;               /* blocks landed, blocks wanted */
  bool own[NB];                         /* its local pages; another request may have the others */
  byte mem[NOPS];
  byte op[NOPS]; byte val[NOPS];        /* data reads, and bytes on their way */
  byte wop; byte wval;                  /* the read of the word */
#ifdef LEASE
  byte req; byte ack; byte done;        /* bit k: lease asked for, acknowledged, really done with */
  bool leased;                          /* the owner's answer came */
#endif
}
Stream s[NS]; Pub pub[NG+1]; Reader rd[NR];
byte mem[NP*RANKS]; byte word[WORDS];
byte freeb; byte limbo;                 /* bit p */
byte nt; byte ng; byte seqc; byte life;
bool up = true;
#ifdef M_TABLE_LATE
bool old_words;
#endif
/* Used within one d_step alone. A search by breadth cannot leave variables out of the state. */
#ifdef MUTANT
#define scratch
#else
#define scratch hidden
#endif
scratch byte xb; scratch byte xk; scratch byte xp; scratch byte xq; scratch byte kept;

/* Sets of pages are bits. NONE is in none of them. */
#define BIT(x) (1 << (x))
#define ALL (BIT(NP)-1)
#define IN(x) (BIT(x) & ALL)
#if NB > 1
#define SUM(list) (IN(list[0]) + IN(list[1]))
#define SET(list) (IN(list[0]) | IN(list[1]))
#else
#define SUM(list) IN(list[0])
#define SET(list) IN(list[0])
#endif
#if NS > 1
#define STREAMS(op,X,list) X(s[0].list) op X(s[1].list)
#else
#define STREAMS(op,X,list) X(s[0].list)
#endif
/* Publications whose pages are held, and those whose word is still there. */
#ifdef M_WORD_AFTER_FREE
#define HOLDS(k) VALID(k)
#else
#define HOLDS(k) (pub[k].st >= HELD && pub[k].st <= CLEARED)
#endif
#define VALID(k) (pub[k].st == HELD || pub[k].st == DUE)
#define PUB(X,k) (X(k) -> SET(pub[k].pg) : 0)
#if NG == 1
#define NAMED(X) PUB(X,1)
#elif NG == 2
#define NAMED(X) (PUB(X,1) | PUB(X,2))
#else
#define NAMED(X) (PUB(X,1) | PUB(X,2) | PUB(X,3))
#endif

/* ---- What must hold. */

/* Every page is in one place, no free page has a live word, and nothing stays in limbo for no reason.
 * A mutant is not held to the owner's rule itself: it must be caught by what somebody gets. */
#if defined(FORK) && !defined(M_FORK_IN_PLACE)
#define STAGED(op,X) op STREAMS(op,X,fp)
#else
#define STAGED(op,X)
#endif
inline owner_holds() {
  assert(freeb + limbo + STREAMS(+,SUM,pg) STAGED(+,SUM) == ALL);     /* as a sum and as a set: no page is in two places */
  assert((freeb | limbo | STREAMS(|,SET,pg) STAGED(|,SET)) == ALL);
#ifndef MUTANT
  assert(!(freeb & NAMED(VALID)));
  assert(!(limbo & ~NAMED(HOLDS)));
#endif
  skip
}
inline store(x, y, z) {
#ifndef MUTANT
  assert(!(BIT(x) & NAMED(VALID)));
#endif
  mem[(y)*NP+(x)] = z
}
/* Ready means the publisher's bytes, of every rank. */
inline ready(r) {
  xq = 0;
  do
  :: xq < rd[r].stored ->
     assert(rd[r].mem[xq] == pub[rd[r].g].val[xq]);
#if RANKS > 1
     assert(rd[r].mem[NB+xq] == pub[rd[r].g].val[xq]);
#endif
     xq++
  :: else -> break
  od
}

/* ---- The owner's manager: each of these is a part of one of its calls. */

inline take(x) {                        /* the lowest free page */
  xp = 0; do :: !(freeb & BIT(xp)) -> xp++ :: else -> break od;
  freeb = freeb & ~BIT(xp); x = xp
}
#if NP == 1
#define FREES freeb
#elif NP == 2
#define FREES ((freeb&1)+((freeb>>1)&1))
#elif NP == 3
#define FREES ((freeb&1)+((freeb>>1)&1)+((freeb>>2)&1))
#else
#define FREES ((freeb&1)+((freeb>>1)&1)+((freeb>>2)&1)+((freeb>>3)&1))
#endif
/* What the next write of the stream stores: what the host has, if it is reloaded. */
#ifdef OFFLOAD
inline unhost(i) { s[i].hc = 0; xb = 0; do :: xb < NOPS -> s[i].host[xb] = 0; xb++ :: else -> break od; xb = 0 }
inline content(i, x) { if :: s[i].wr < s[i].hc -> x = s[i].host[NB*s[i].wk + s[i].wr] :: else -> x = s[i].val[s[i].wr] fi }
#else
inline unhost(i) { skip }
inline content(i, x) { x = s[i].val[s[i].wr] }
#endif
inline wipe(i) {
  xb = 0;
  do
  :: xb < NB ->
     s[i].pg[xb] = NONE; s[i].val[xb] = 0;
#ifdef FORK
     s[i].fp[xb] = NONE;
#endif
     xb++
  :: else -> break
  od;
#ifdef FORK
  s[i].fn = 0; s[i].fc = 0;
#endif
  unhost(i);
  s[i].st = EMPTY; s[i].n = 0; s[i].wr = 0; s[i].wk = 0; s[i].g = 0
}
inline vacate(i) {
  xb = 0; do :: xb < s[i].n -> s[i].pg[xb] = NONE; xb++ :: else -> break od;
  s[i].n = 0; s[i].wr = 0; s[i].wk = 0
}
inline leave(i) {                       /* all pages leave the stream: to limbo if a live publication names them, else free */
  limbo = limbo | (SET(s[i].pg) & NAMED(HOLDS)); freeb = freeb | (SET(s[i].pg) & ~NAMED(HOLDS)); vacate(i)
}
inline leave_freed(i) {                 /* mutants: they are free at once */
  freeb = freeb | SET(s[i].pg); vacate(i)
}
/* The publications of the stream's pages are to end. The word comes first, in Ends below; to is CLEARED in mutants that
 * forget it. */
inline unpublish(i, to) {
  xk = 1;
  do
  :: xk <= NG ->
     if
     :: pub[xk].st == HELD && (s[i].g == xk || (SET(pub[xk].pg) & SET(s[i].pg))) -> pub[xk].st = to; unlease(xk)
     :: else
     fi;
     xk++
  :: else -> break
  od;
  s[i].g = 0
}
#ifdef LEASE
#define LEASED(k) (pub[k].lease != 0)
inline unlease(k) { pub[k].lease = 0 }
#else
#define LEASED(k) false
inline unlease(k) { skip }
#endif
inline forget(k) { xq = 0; do :: xq < NS -> if :: s[xq].g == (k) -> s[xq].g = 0 :: else fi; xq++ :: else -> break od }
inline unlimbo(k) {                     /* pages that no other live publication names become free */
#ifdef M_FIRST_OF_TWO
  freeb = freeb | (limbo & SET(pub[k].pg)); limbo = limbo & ~SET(pub[k].pg)
#else
  freeb = freeb | (limbo & ~NAMED(HOLDS)); limbo = limbo & NAMED(HOLDS)
#endif
}
#if NG == 1
#define USED(x) (HOLDS(1) && pub[1].slot == (x))
#elif NG == 2
#define USED(x) (HOLDS(1) && pub[1].slot == (x) || HOLDS(2) && pub[2].slot == (x))
#else
#define USED(x) (HOLDS(1) && pub[1].slot == (x) || HOLDS(2) && pub[2].slot == (x) || HOLDS(3) && pub[3].slot == (x))
#endif
#if SLOTS == 1
#define HAS_WORD (!USED(0))
#else
#define HAS_WORD (!USED(0) || !USED(1))
#endif
/* Word, then announcement: who has not heard of it cannot look for the word. */
inline publish(i) {
  ng++; seqc++; s[i].g = ng;
#ifdef M_TABLE_LATE
  if :: old_words -> xq = 0; do :: xq < WORDS -> word[xq] = 0; xq++ :: else -> break od; old_words = false :: else fi;
#endif
  if :: !USED(0) -> xq = 0 :: else -> xq = 1 fi;
  pub[ng].slot = AT(life, xq); pub[ng].word = SEAL(life, seqc); word[AT(life, xq)] = SEAL(life, seqc);
  pub[ng].st = HELD
}
inline announce(i, to) {                /* pages are named when their bytes are there */
  xb = pub[s[i].g].wm;
  do
  :: xb < to -> pub[s[i].g].pg[xb] = s[i].pg[xb]; pub[s[i].g].val[xb] = s[i].val[xb]; xb++
  :: else -> break
  od;
  pub[s[i].g].wm = to
}
#ifdef M_LENGTH_BEFORE_BYTES
#define READY(i) s[i].n
#else
#define READY(i) s[i].wr
#endif
#ifdef TWO
#define MAY_PUBLISH(i) true             /* again, while the older publication lives */
#else
#define MAY_PUBLISH(i) (s[i].g == 0)
#endif
#ifdef FORK
#define OTHER(i) (1-(i))
#define FREELY(i) (s[i].fn == 0 && s[OTHER(i)].fn == 0)   /* no fork of it or onto it is under way */
#else
#define FREELY(i) true
#endif
/* The engine's calls for stream i. */
proctype Engine(byte i) {
end: do
  :: d_step { up && s[i].st == EMPTY && (i == 0 || s[0].st != EMPTY) && nt < NT && freeb != 0 ->
       nt++; s[i].st = LIVE; xb = 0; do :: xb < NB -> s[i].val[xb] = BYTES(nt,xb); xb++ :: else -> break od;
       take(s[i].pg[0]); s[i].n = 1; owner_holds();
       printf("@ request %d begins with page %d\n", i, s[i].pg[0]) }
  :: d_step { up && s[i].st == LIVE && s[i].n < NB && freeb != 0 && FREELY(i) ->
       take(s[i].pg[s[i].n]); s[i].n++; owner_holds();
       printf("@ request %d grows by page %d\n", i, s[i].pg[s[i].n-1]) }
  :: d_step { up && s[i].st == LIVE && s[i].wr < s[i].n && FREELY(i) ->
       content(i, kept); store(s[i].pg[s[i].wr], s[i].wk, kept);
       printf("@ request %d writes %d to page %d of rank %d\n", i, kept, s[i].pg[s[i].wr], s[i].wk);
       s[i].wk++;
       if :: s[i].wk == RANKS -> s[i].wk = 0; s[i].wr++ :: else fi;
#ifdef OFFLOAD
       if :: s[i].wr >= s[i].hc -> unhost(i) :: else fi;
#endif
       skip }
  :: d_step { up && s[i].st == LIVE && MAY_PUBLISH(i) && READY(i) > 0 && ng < NG && HAS_WORD ->
       publish(i); announce(i, READY(i));
       printf("@ request %d: publication %d of %d pages, word %d = %d\n", i, ng, pub[ng].wm, pub[ng].slot, pub[ng].word) }
  :: d_step { up && s[i].st == LIVE && s[i].g != 0 && pub[s[i].g].wm < READY(i) ->
       announce(i, READY(i));
       printf("@ publication %d grows to %d pages\n", s[i].g, pub[s[i].g].wm) }
  :: d_step { up && s[i].st == LIVE && FREELY(i) ->            /* final: it lives on in limbo */
       printf("@ request %d is removed, its publications live on\n", i);
       leave(i); wipe(i); owner_holds() }
  :: d_step { up && s[i].st == LIVE && s[i].g != 0 && FREELY(i) ->   /* open, or discarded: it ends */
       printf("@ request %d is removed with its publications\n", i);
       unpublish(i, DUE); leave(i); wipe(i); owner_holds() }
#ifdef RESET
  :: d_step { up && s[i].st == LIVE && s[i].wr > 0 && nt < NT && FREELY(i) ->   /* free: all pages leave */
       printf("@ request %d is reset, all its pages leave\n", i);
#ifdef M_RESET_FREES_EARLY
       unpublish(i, DUE); leave_freed(i);
#else
       unpublish(i, DUE); leave(i);
#endif
       unhost(i); nt++; xb = 0; do :: xb < NB -> s[i].val[xb] = BYTES(nt,xb); xb++ :: else -> break od;
       owner_holds() }
  :: d_step { up && s[i].st == LIVE && s[i].wr > 0 && nt < NT && FREELY(i) ->   /* not free: it keeps what was not published */
       printf("@ request %d is reset and keeps its unpublished pages\n", i);
       unpublish(i, DUE);
       s[i].wr = 0; s[i].wk = 0;
#ifndef M_RESET_IN_PLACE
       xb = 0; kept = 0;
       do
       :: xb < s[i].n ->
          xp = s[i].pg[xb]; s[i].pg[xb] = NONE;
          if :: BIT(xp) & NAMED(HOLDS) -> limbo = limbo | BIT(xp) :: else -> s[i].pg[kept] = xp; kept++ fi;
          xb++
       :: else -> break
       od;
       s[i].n = kept;
#endif
       unhost(i); nt++; xb = 0; do :: xb < NB -> s[i].val[xb] = BYTES(nt,xb); xb++ :: else -> break od;
       owner_holds() }
#endif
#ifdef FORK
#ifdef M_FORK_IN_PLACE
  :: d_step { up && s[i].st == LIVE && FREELY(i) && s[OTHER(i)].st == LIVE &&
       s[OTHER(i)].wr == s[OTHER(i)].n && s[i].n == s[OTHER(i)].n ->
       xb = 0; do :: xb < s[i].n -> s[i].fp[xb] = s[i].pg[xb]; xb++ :: else -> break od;
#else
  :: d_step { up && s[i].st == LIVE && FREELY(i) && s[OTHER(i)].st == LIVE &&
       s[OTHER(i)].n > 0 && s[OTHER(i)].wr == s[OTHER(i)].n && FREES >= s[OTHER(i)].n ->
       xb = 0; do :: xb < s[OTHER(i)].n -> take(s[i].fp[xb]); xb++ :: else -> break od;
#endif
       s[i].fn = s[OTHER(i)].n; owner_holds();
       printf("@ a step forks request %d onto %d: pages %d %d are reserved\n", OTHER(i), i, s[i].fp[0], s[i].fp[NB-1]) }
  :: d_step { up && s[i].fc < s[i].fn ->
       printf("@ the step copies page %d to %d\n", s[OTHER(i)].pg[s[i].fc], s[i].fp[s[i].fc]);
       store(s[i].fp[s[i].fc], 0, mem[s[OTHER(i)].pg[s[i].fc]]);
#if RANKS > 1
       store(s[i].fp[s[i].fc], 1, mem[NP + s[OTHER(i)].pg[s[i].fc]]);
#endif
       s[i].fc++ }
#ifndef M_FORK_IN_PLACE
  :: d_step { up && s[i].fn > 0 ->
       printf("@ the step with the fork is aborted\n");
       xb = 0; do :: xb < s[i].fn -> freeb = freeb | BIT(s[i].fp[xb]); s[i].fp[xb] = NONE; xb++ :: else -> break od;
       s[i].fn = 0; s[i].fc = 0; owner_holds() }
#endif
  :: d_step { up && s[i].fn > 0 && s[i].fc == s[i].fn ->
       printf("@ the step with the fork onto request %d commits\n", i);
#ifdef M_FORK_KEEPS_WORD
       unpublish(i, CLEARED); leave(i);
#else
#ifdef M_FORK_FREES_EARLY
       unpublish(i, DUE); leave_freed(i);
#else
#ifdef M_FORK_IN_PLACE
       unpublish(i, DUE); s[i].n = 0;
#else
       unpublish(i, DUE); leave(i);
#endif
#endif
#endif
       xb = 0;
       do
       :: xb < s[i].fn -> s[i].pg[xb] = s[i].fp[xb]; s[i].fp[xb] = NONE; s[i].val[xb] = s[OTHER(i)].val[xb]; xb++
       :: else -> break
       od;
       unhost(i); s[i].n = s[i].fn; s[i].wr = s[i].fn; s[i].fn = 0; s[i].fc = 0; owner_holds() }
#endif
#ifdef OFFLOAD
  :: d_step { up && s[i].st == LIVE && s[i].n > 0 && s[i].wr == s[i].n && FREELY(i) ->
       s[i].st = CLAIMED; printf("@ request %d is claimed for offload\n", i) }
  :: d_step { up && s[i].st == CLAIMED && s[i].hc < s[i].n ->
       printf("@ page %d is copied to the host\n", s[i].pg[s[i].hc]);
       s[i].host[s[i].hc] = mem[s[i].pg[s[i].hc]];
#if RANKS > 1
       s[i].host[NB + s[i].hc] = mem[NP + s[i].pg[s[i].hc]];
#endif
       s[i].hc++ }
  :: d_step { up && s[i].st == CLAIMED ->
       printf("@ the offload of request %d is given up\n", i);
       unhost(i); s[i].st = LIVE }
  :: d_step { up && s[i].st == CLAIMED && s[i].hc == s[i].n ->
       printf("@ the offload of request %d commits, its pages leave\n", i);
#ifdef M_OFFLOAD_KEEPS_WORD
       unpublish(i, CLEARED); leave(i);
#else
#ifdef M_OFFLOAD_FREES_EARLY
       unpublish(i, DUE); leave_freed(i);
#else
       unpublish(i, DUE); leave(i);
#endif
#endif
       s[i].st = HOST; owner_holds() }
  :: d_step { up && s[i].st == HOST && s[i].g == 0 && ng < NG && HAS_WORD ->
       publish(i); printf("@ request %d: publication %d says on host, word %d = %d\n", i, ng, pub[ng].slot, pub[ng].word) }
  :: d_step { up && s[i].st == HOST && FREES >= s[i].hc ->     /* bytes follow by the write above */
       s[i].st = LIVE;
       do :: s[i].n < s[i].hc -> take(s[i].pg[s[i].n]); s[i].n++ :: else -> break od;
#ifdef M_RELOAD_NAMED_EARLY
       if :: s[i].g != 0 -> announce(i, s[i].n) :: else fi;
#endif
       owner_holds();
       printf("@ request %d is reloaded to pages %d %d\n", i, s[i].pg[0], s[i].pg[NB-1]) }
  :: d_step { up && s[i].st == HOST ->
       printf("@ request %d is removed while on the host\n", i);
       unpublish(i, DUE); wipe(i); owner_holds() }
#endif
  od
}
/* The owner's node ends publication k: acknowledged, held long enough, or revoked. */
proctype Ends(byte k) {
end: do
  :: d_step { up && pub[k].st == HELD && !LEASED(k) ->
       pub[k].st = DUE; forget(k); printf("@ publication %d is to end\n", k) }
#if defined(REVOKE) && !defined(M_LEASE_FOR_EVER)
  :: d_step { up && pub[k].st == HELD && LEASED(k) ->          /* revoked, or held for as long as renewals may */
       pub[k].st = DUE; unlease(k); forget(k); printf("@ publication %d is to end, leased as it is\n", k) }
#endif
#ifdef M_WORD_AFTER_FREE
  :: d_step { up && pub[k].st == DUE -> pub[k].st = CLEARED; unlimbo(k); owner_holds();
       printf("@ pages of publication %d leave limbo\n", k) }
  :: d_step { up && pub[k].st == CLEARED -> word[pub[k].slot] = 0; pub[k].st = ENDED;
       printf("@ word %d of publication %d = 0\n", pub[k].slot, k) }
#else
  :: d_step { up && pub[k].st == DUE ->
       word[pub[k].slot] = 0; pub[k].st = CLEARED; printf("@ word %d of publication %d = 0\n", pub[k].slot, k) }
  :: d_step { up && pub[k].st == CLEARED ->
       pub[k].st = ENDED; unlimbo(k); owner_holds(); printf("@ publication %d has ended, its pages leave limbo\n", k) }
#endif
  od
}
#ifdef LEASE
/* Leases run out. */
proctype Expires(byte k) {
end: do
#ifndef M_LEASE_FOR_EVER
  :: d_step { up && (pub[k].lease & 1) -> pub[k].lease = pub[k].lease & ~1;
       printf("@ the lease of reader 0 on publication %d runs out\n", k) }
#if NR > 1
  :: d_step { up && (pub[k].lease & 2) -> pub[k].lease = pub[k].lease & ~2;
       printf("@ the lease of reader 1 on publication %d runs out\n", k) }
#endif
#endif
  :: false
  od
}
/* Lease requests, renewals, and acknowledgements come in any order, any number of times, or never. */
#ifdef M_ACK_WITHOUT_IDENTITY
#define ACKED(r,k) (rd[r].ack != 0)
#else
#define ACKED(r,k) (rd[r].ack & BIT(k))
#endif
proctype Net(byte r; byte k) {
end: do
  :: d_step { up && pub[k].st == HELD && (rd[r].req & BIT(k)) &&
       (!(pub[k].lease & BIT(r)) || !rd[r].leased && rd[r].g == k && rd[r].st != IDLE) ->
       pub[k].lease = pub[k].lease | BIT(r);
       if :: rd[r].g == k && rd[r].st != IDLE -> rd[r].leased = true :: else fi;
       printf("@ reader %d gets a lease on publication %d\n", r, k) }
  :: d_step { up && pub[k].st == HELD && (pub[k].lease & BIT(r)) && ACKED(r,k) ->
       printf("@ an acknowledgement of reader %d ends its lease on publication %d\n", r, k);
       assert(rd[r].done & BIT(k));                            /* only its own end of this publication does */
       pub[k].lease = pub[k].lease & ~BIT(r) }
  od
}
#endif
#ifdef CRASH
/* The owner dies. Memory and words stay as they are, for readers map them. The new life clears every word first. */
proctype Crash() {
  d_step { up = false; xk = 1;
    do
    :: xk <= NG -> if :: pub[xk].st != UNMADE -> pub[xk].st = ENDED; unlease(xk) :: else fi; xk++
    :: else -> break
    od;
    xk = 0; do :: xk < NS -> wipe(xk); xk++ :: else -> break od;
    freeb = ALL; limbo = 0; printf("@ the owner dies\n") };
  d_step { life = 1; seqc = 0;
#ifdef M_TABLE_LATE
    old_words = true;
#else
#ifndef M_OLD_TABLE
    xk = 0; do :: xk < WORDS -> word[xk] = 0; xk++ :: else -> break od;
#endif
#endif
    up = true; printf("@ the owner lives again\n") }
}
#endif

/* ---- The reader. */

/* The fabric serves what reader r posts, late and in any order. */
#define SERVE(r,o,rank,b) \
  :: d_step { rd[r].op[o] == POSTED -> rd[r].val[o] = mem[(rank)*NP + pub[rd[r].g].pg[b]]; rd[r].op[o] = SERVED; \
       printf("@ page %d of rank %d is read: %d\n", pub[rd[r].g].pg[b], rank, rd[r].val[o]) } \
  :: d_step { rd[r].op[o] == SERVED -> printf("@ its bytes land in block %d of rank %d\n", b, rank); \
       assert(rd[r].own[b]);            /* no late byte in a page of another owner */ \
       rd[r].mem[o] = rd[r].val[o]; rd[r].val[o] = 0; rd[r].op[o] = DONE }
#define LOSE(r,o) :: d_step { rd[r].op[o] == POSTED -> rd[r].op[o] = DEAD; printf("@ a read of block %d is lost\n", o) }
proctype Fabric(byte r) {
end: do
  SERVE(r,0,0,0)
#if NB > 1
  SERVE(r,1,0,1)
#endif
#if RANKS > 1
  SERVE(r,NB,1,0)
#if NB > 1
  SERVE(r,NB+1,1,1)
#endif
#endif
#ifdef LOSS
  LOSE(r,0)
#if NOPS > 1
  LOSE(r,1)
#endif
  :: d_step { rd[r].wop == POSTED -> rd[r].wop = DEAD; printf("@ the read of the word is lost\n") }
#endif
  :: d_step { rd[r].wop == POSTED -> rd[r].wval = word[pub[rd[r].g].slot]; rd[r].wop = SERVED;
       printf("@ word %d is read: %d\n", pub[rd[r].g].slot, rd[r].wval) }
  od
}
#define QUIET(r,o) (rd[r].op[o] == NOREAD || rd[r].op[o] == DONE)
#if NOPS == 1
#define ALLDONE(r) QUIET(r,0)
#elif NOPS == 2
#define ALLDONE(r) (QUIET(r,0) && QUIET(r,1))
#else
#define ALLDONE(r) (QUIET(r,0) && QUIET(r,1) && QUIET(r,2) && QUIET(r,3))
#endif
/* When the read of the word may be posted. */
#ifdef M_WORD_BESIDE_DATA
#define WORD_MAY(r) true
#else
#ifdef M_ONE_RANK
#if NB > 1
#define WORD_MAY(r) (QUIET(r,0) && QUIET(r,1))
#else
#define WORD_MAY(r) QUIET(r,0)
#endif
#else
#define WORD_MAY(r) ALLDONE(r)
#endif
#endif
inline fence(r) {                       /* nothing can land any more */
  xq = 0; do :: xq < NOPS -> rd[r].op[xq] = NOREAD; rd[r].val[xq] = 0; xq++ :: else -> break od;
  rd[r].wop = NOREAD; rd[r].wval = 0
}
inline drop(r, from) {                  /* local pages from block `from` on go back */
  xq = from;
  do
  :: xq < NB ->
     rd[r].own[xq] = false; rd[r].mem[xq] = JUNK;
#if RANKS > 1
     rd[r].mem[NB+xq] = JUNK;
#endif
     xq++
  :: else -> break
  od
}
inline finish(r) {                      /* the retrieval is over */
  drop(r, 0);
#ifdef LEASE
  rd[r].done = rd[r].done | BIT(rd[r].g); rd[r].leased = false;
#endif
  rd[r].stored = 0; rd[r].want = 0; rd[r].st = IDLE;
#ifndef M_NO_DRAIN
  rd[r].g = 0
#endif
}
inline issue(r) {                       /* [stored, want): no read writes below stored */
  rd[r].tries++; rd[r].want = pub[rd[r].g].wm; rd[r].st = READING;
  xq = rd[r].stored;
  do
  :: xq < rd[r].want ->
     rd[r].own[xq] = true; rd[r].op[xq] = POSTED;
#if RANKS > 1
     rd[r].op[NB+xq] = POSTED;
#endif
     xq++
  :: else -> break
  od
}
#ifdef LEASE
inline ask(r) { rd[r].req = rd[r].req | BIT(rd[r].g) }
inline acknowledge(r) { rd[r].done = rd[r].done | BIT(rd[r].g); rd[r].ack = rd[r].ack | BIT(rd[r].g) }
#else
inline ask(r) { skip }
inline acknowledge(r) { skip }
#endif
#define PICK(r,k) \
  :: d_step { rd[r].st == IDLE && rd[r].tries < TRIES && ALLDONE(r) && pub[k].wm > 0 -> \
       rd[r].g = k; ask(r); issue(r); printf("@ reader %d reads %d pages of publication %d\n", r, pub[k].wm, k) }

proctype Reads(byte r) {
end: do
  PICK(r,1)                             /* any announcement, however old */
#if NG > 1
  PICK(r,2)
#endif
#if NG > 2
  PICK(r,3)
#endif
#if NB > 1
  :: d_step { rd[r].st == LANDED && rd[r].tries < TRIES && pub[rd[r].g].wm > rd[r].stored ->
       issue(r); printf("@ reader %d reads on\n", r) }
#endif
  :: d_step { rd[r].st == READING && WORD_MAY(r) -> rd[r].wop = POSTED; rd[r].st = VALIDATING;
       printf("@ reader %d asks for the word\n", r) }
  :: d_step { rd[r].st == VALIDATING && rd[r].wop == SERVED && ALLDONE(r) && rd[r].wval == pub[rd[r].g].word ->
       rd[r].stored = rd[r].want; fence(r); rd[r].st = LANDED; printf("@ reader %d: ready\n", r);
       ready(r); acknowledge(r) }
#ifdef M_LEASE_FOR_WORD
  :: d_step { rd[r].st == VALIDATING && rd[r].leased && ALLDONE(r) ->
       rd[r].stored = rd[r].want; fence(r); rd[r].st = LANDED; printf("@ reader %d: ready\n", r);
       ready(r); acknowledge(r) }
#endif
  :: d_step { rd[r].st == VALIDATING && rd[r].wop == SERVED && ALLDONE(r) && rd[r].wval != pub[rd[r].g].word ->
       printf("@ reader %d: stale\n", r);
       fence(r); rd[r].want = 0;
       if :: rd[r].stored > 0 -> drop(r, rd[r].stored); rd[r].st = LANDED :: else -> finish(r) fi;
       skip }
  :: d_step { rd[r].st == READING || rd[r].st == VALIDATING ->   /* cancelled, too late, or the peer is dead */
       printf("@ reader %d gives up\n", r);
#ifdef M_NO_DRAIN
       finish(r)
#else
       rd[r].st = DRAINING
#endif
     }
  :: d_step { rd[r].st == DRAINING && ALLDONE(r) -> fence(r); finish(r); printf("@ nothing is on its way to reader %d\n", r) }
#ifndef M_DRAIN_WITHOUT_DESTROY
  :: d_step { rd[r].st == DRAINING && !ALLDONE(r) -> fence(r); finish(r); printf("@ reader %d destroys its connection\n", r) }
#endif
  :: d_step { rd[r].st == LANDED ->
       ready(r); finish(r); printf("@ reader %d is done with its request\n", r) }
  od
}
init {
  byte x;
  atomic {
    freeb = ALL;
    x = 0; do :: x < NS -> d_step { wipe(x) }; run Engine(x); x++ :: else -> break od;
    x = 0;
    do
    :: x <= NG -> d_step { xb = 0; do :: xb < NB -> pub[x].pg[xb] = NONE; xb++ :: else -> break od; xb = 0 }; x++
    :: else -> break
    od;
    x = 1;
    do
    :: x <= NG ->
       run Ends(x);
#ifdef LEASE
       run Expires(x); run Net(0,x);
#if NR > 1
       run Net(1,x);
#endif
#endif
       x++
    :: else -> break
    od;
    x = 0; do :: x < NR -> run Fabric(x); run Reads(x); x++ :: else -> break od;
#ifdef CRASH
    run Crash();
#endif
    x = 0
  }
}
#ifdef LIVENESS
#define BUSY (rd[0].st == READING || rd[0].st == VALIDATING || rd[0].st == DRAINING)
ltl retrieval_ends { [] (BUSY -> <> !BUSY) }
ltl limbo_empties { [] (limbo != 0 -> <> (limbo == 0)) }
#endif

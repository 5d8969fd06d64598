#!/usr/bin/env bash
# readable.sh: turns the output of go test -v, which it reads, into what a person
# reads: one line a package, every skip with its reason, and what a failed test
# said: the last 60 lines of it, or of its package if no test is to blame. Lines
# that begin with "> " are for a person already.
exec awk -v most=60 '
	function last(text, title,   lines, n, i) {
		n = split(text, lines, "\n") - 1
		print "---- " title
		if (n > most) print "  (" n - most " lines before these, of which:"
		for (i = 1; i <= n - most; i++) if (lines[i] ~ /_test\.go:[0-9]+: / && lines[i] !~ /level=/) print lines[i]
		if (n > most) print "  )"
		for (i = n > most ? n - most + 1 : 1; i <= n; i++) print lines[i]
	}
	/^> / { print substr($0, 3); fflush(); next }
	/^[ \t]*=== (RUN|PAUSE|CONT|NAME)/ { test = $3; next }
	/^[ \t]+[A-Za-z0-9_]+_test\.go:[0-9]+: / { said[test] = $0; sub(/^[ \t]+/, "", said[test]) }
	/^[ \t]*--- PASS: / { next }
	/^[ \t]*--- SKIP: / { skips = skips "  skipped " $3 ": " said[$3] "\n"; next }
	/^[ \t]*--- FAIL: / { failed[++fails] = $3; next }
	/^(ok|FAIL|\?)[ \t]/ {
		if ($1 == "FAIL") {
			for (i = 1; i <= fails; i++) if (by[failed[i]] != "") last(by[failed[i]], failed[i])
			if (!fails) last(chunk, $2)
		}
		print; printf "%s", skips; fflush()
		chunk = skips = test = ""; fails = 0; split("", said); split("", by); next
	}
	/^(FAIL|PASS|exit status .*)$/ { next }
	{ chunk = chunk $0 "\n"; by[test] = by[test] $0 "\n" }
	END { if (chunk != "") last(chunk, "without a package") }'

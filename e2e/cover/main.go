// Command cover prints the coverage of each package by the first profile and by all profiles together: by the tests of
// all packages, and by what the programs did in the end-to-end tests, too. It fails for hand-written packages below a
// limit. Generated files do not count. `make cover` calls it with the profiles that the Go tool wrote.
package main

import (
	"bufio"
	"cmp"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/tools/cover"
)

func main() {
	least := flag.Float64("least", 70, "the least coverage of a package, in percent")
	module := flag.String("module", "", "the path of the module whose root is the current directory")
	exempt := flag.String("exempt", "", "a file of packages below the limit: a package and the reason in each line")
	flag.Parse()
	if err := run(os.Stdout, ".", *module, *exempt, *least, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "cover:", err)
		os.Exit(1)
	}
}

// block is a block of statements of a file.
type block struct {
	file                                       string
	startLine, startColumn, endLine, endColumn int
}

// statements count what a block or a package has, what of it ran, and what ran in the first profile already.
type statements struct{ all, ran, first int }

func run(out io.Writer, root, module, exempt string, least float64, profiles []string) error {
	blocks := map[block]statements{}
	for n, profile := range profiles {
		parsed, err := cover.ParseProfiles(profile)
		if err != nil {
			return fmt.Errorf("read %s: %w", profile, err)
		}
		merge(blocks, parsed, n == 0)
	}
	if len(blocks) == 0 {
		return errors.New("the profiles are empty")
	}
	packages, err := byPackage(blocks, root, module)
	if err != nil {
		return err
	}
	reasons, err := readReasons(exempt)
	if err != nil {
		return err
	}
	return report(out, packages, reasons, least)
}

// merge adds profiles: a block ran if it ran in any of them.
func merge(blocks map[block]statements, profiles []*cover.Profile, first bool) {
	for _, p := range profiles {
		for _, b := range p.Blocks {
			key := block{p.FileName, b.StartLine, b.StartCol, b.EndLine, b.EndCol}
			s := blocks[key]
			s.all = b.NumStmt
			if b.Count > 0 {
				s.ran = b.NumStmt
				if first {
					s.first = b.NumStmt
				}
			}
			blocks[key] = s
		}
	}
}

// byPackage sums up the blocks of hand-written files.
func byPackage(blocks map[block]statements, root, module string) (map[string]statements, error) {
	generated, packages := map[string]bool{}, map[string]statements{}
	for b, s := range blocks {
		file := strings.TrimPrefix(b.file, module+"/")
		skip, known := generated[file]
		if !known {
			parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, file), nil,
				parser.ParseComments|parser.PackageClauseOnly)
			if err != nil {
				return nil, err
			}
			skip = ast.IsGenerated(parsed)
			generated[file] = skip
		}
		if !skip {
			sum := packages[path.Dir(file)]
			packages[path.Dir(file)] = statements{sum.all + s.all, sum.ran + s.ran, sum.first + s.first}
		}
	}
	return packages, nil
}

func (s statements) percent() float64 { return s.share(s.ran) }

func (s statements) share(ran int) float64 { return 100 * float64(ran) / float64(max(s.all, 1)) }

// report prints the packages, the least covered first. A reason that no package needs any more is an error too.
func report(out io.Writer, packages map[string]statements, reasons map[string]string, least float64) error {
	names := slices.SortedFunc(maps.Keys(packages), func(a, b string) int {
		return cmp.Or(cmp.Compare(packages[a].percent(), packages[b].percent()), strings.Compare(a, b))
	})
	var problems []error
	for _, name := range names {
		s := packages[name]
		_, _ = fmt.Fprintf(out, "%5.1f %% %5.1f %% of %5d  %s\n", s.share(s.first), s.percent(), s.all, name)
		_, excused := reasons[name]
		switch below := s.percent() < least; {
		case below && !excused:
			problems = append(problems, fmt.Errorf("%s: %.1f %% is below %v %%", name, s.percent(), least))
		case !below && excused:
			problems = append(problems, fmt.Errorf("%s reaches %v %%: it needs no exemption", name, least))
		}
	}
	for name := range reasons {
		if _, ok := packages[name]; !ok {
			problems = append(problems, fmt.Errorf("%s is exempt and in no profile", name))
		}
	}
	return errors.Join(problems...)
}

// readReasons reads the list of exemptions; each has a reason.
func readReasons(file string) (map[string]string, error) {
	reasons := map[string]string{}
	if file == "" {
		return reasons, nil
	}
	list, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer func() { _ = list.Close() }()
	lines := bufio.NewScanner(list)
	for lines.Scan() {
		name, reason, _ := strings.Cut(lines.Text(), " ")
		if name == "" || name == "#" {
			continue
		}
		if strings.TrimSpace(reason) == "" {
			return nil, fmt.Errorf("%s: %s has no reason", file, name)
		}
		reasons[name] = reason
	}
	return reasons, lines.Err()
}

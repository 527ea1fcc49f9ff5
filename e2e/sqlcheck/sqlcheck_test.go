package sqlcheck

import (
	"fmt"
	"go/ast"
	"go/constant"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	cockroach "github.com/cockroachdb/cockroachdb-parser/pkg/sql/parser"
)

const hub = "../../hub/internal"

// postgresOnly are the rooms that run or test a private PostgreSQL and speak to nothing else.
func postgresOnly(dir string) bool {
	return strings.HasSuffix(dir, "/db/managed") || strings.HasSuffix(dir, "/db/dbtest")
}

// verbs start a statement. They are upper case in this house, which tells them from prose.
func verbs() *regexp.Regexp {
	return regexp.MustCompile(
		`^\s*(SELECT|INSERT|UPDATE|DELETE|WITH|CREATE|ALTER|DROP|UPSERT|TRUNCATE|COPY|SET|SHOW|LOCK|LISTEN|NOTIFY|MERGE)\s`)
}

// clauses go on where another string ends.
func clauses() *regexp.Regexp { return regexp.MustCompile(`^\s*(WHERE|ORDER BY|LIMIT)\s`) }

func TestEveryMigrationIsUnderstoodByCockroachDB(t *testing.T) {
	files, err := filepath.Glob(hub + "/db/migrations/*.sql")
	if err != nil || len(files) == 0 {
		t.Fatalf("no migrations found: %v", err)
	}
	for _, name := range files {
		raw, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		up, _, _ := strings.Cut(string(raw), "-- +goose Down")
		parsed, err := cockroach.Parse(up)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if len(parsed) == 0 {
			t.Errorf("%s holds no statement", name)
		}
		refuseWhatIsMissingThere(t, name, up)
	}
}

func TestEveryStatementIsUnderstoodByCockroachDB(t *testing.T) {
	total := 0
	err := filepath.WalkDir(hub, func(dir string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() || postgresOnly(filepath.ToSlash(dir)) {
			return err
		}
		for _, s := range statementsIn(t, dir) {
			total++
			check(t, s)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if total < 20 {
		t.Fatalf("only %d statements found: the search is broken", total)
	}
	t.Logf("%d statements", total)
}

// check parses a statement. Where a part is chosen at run time (a condition that may be absent, the name of a table,
// the number of a parameter) the rest must be right around one of these.
func check(t *testing.T, s statement) {
	t.Helper()
	tries := []string{""}
	for i, part := range s.parts {
		choices := []string{strings.ReplaceAll(part, "$%d", "$9")} // a format for the number of a parameter
		if s.chosen[i] {
			choices = []string{"", " x", "$9"}
		}
		var longer []string
		for _, start := range tries {
			for _, c := range choices {
				longer = append(longer, start+c)
			}
		}
		tries = longer
	}
	var first error
	for _, sql := range tries {
		_, err := cockroach.Parse(sql)
		if err == nil {
			refuseWhatIsMissingThere(t, s.at, sql)
			return
		}
		if first == nil {
			first = err
		}
	}
	t.Errorf("%s: %v\n%s", s.at, first, strings.Join(s.parts, "…"))
}

// refuseWhatIsMissingThere names what the parser lets pass although CockroachDB does not do it, or does it otherwise.
func refuseWhatIsMissingThere(t *testing.T, at, sql string) {
	t.Helper()
	for _, bad := range []string{
		`\bSERIAL\b`, `\bBIGSERIAL\b`, `\bLISTEN\b`, `\bNOTIFY\b`, `\bMERGE INTO\b`,
		`\bLOCK TABLE\b`, `pg_(try_)?advisory`, `\bCREATE (OR REPLACE )?TRIGGER\b`, `\bCREATE EXTENSION\b`, `\bDEFERRABLE\b`,
		`\bCREATE SEQUENCE\b`, `\bnextval\b`,
	} {
		if regexp.MustCompile(`(?i)` + bad).MatchString(sql) {
			t.Errorf("%s: uses %s, which is not for both engines", at, bad)
		}
	}
}

// statement is a text of SQL in its parts; chosen marks those that are known at run time only (and empty here).
type statement struct {
	at     string
	parts  []string
	chosen []bool
}

// statementsIn finds, in a package without its tests, every string that starts like a statement or a clause, its
// constants put together as the compiler would.
func statementsIn(t *testing.T, dir string) []statement {
	t.Helper()
	fset := token.NewFileSet()
	var files []*ast.File
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") || strings.HasSuffix(e.Name(),
			".gen.go") {
			continue
		}
		file, err := parser.ParseFile(fset, filepath.Join(dir, e.Name()), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}}
	// Imports stay unresolved: constants of the package itself are all that a statement is made of.
	conf := types.Config{Importer: importer.Default(), Error: func(error) {}}
	_, _ = conf.Check(dir, fset, files, info)

	var found []statement
	for _, file := range files {
		ast.Inspect(file, func(n ast.Node) bool {
			expr, ok := n.(ast.Expr)
			if !ok {
				return true
			}
			if _, name := expr.(*ast.Ident); name {
				return true
			}
			parts, chosen := flatten(info, expr)
			if len(parts) == 0 || chosen[0] {
				return true
			}
			s := statement{at: fmt.Sprint(fset.Position(expr.Pos())), parts: parts, chosen: chosen}
			switch {
			case verbs().MatchString(parts[0]):
			case clauses().MatchString(parts[0]):
				s.parts, s.chosen = append([]string{"SELECT * FROM x "}, parts...), append([]bool{false}, chosen...)
			default:
				return true
			}
			found = append(found, s)
			return false
		})
	}
	return found
}

// flatten takes a sum of strings apart. It gives nothing for what is neither a constant string nor a sum.
func flatten(info *types.Info, e ast.Expr) (parts []string, chosen []bool) {
	if v := info.Types[e].Value; v != nil && v.Kind() == constant.String {
		return []string{constant.StringVal(v)}, []bool{false}
	}
	sum, ok := e.(*ast.BinaryExpr)
	if !ok || sum.Op != token.ADD {
		return nil, nil
	}
	for _, side := range []ast.Expr{sum.X, sum.Y} {
		p, c := flatten(info, side)
		if len(p) == 0 {
			p, c = []string{""}, []bool{true}
		}
		parts, chosen = append(parts, p...), append(chosen, c...)
	}
	return parts, chosen
}

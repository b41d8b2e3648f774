import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;

/**
 * A batch in chunks, which asks by SQL, on its own connection and in the transaction of each chunk, whether its run still
 * holds the lock. That costs a round trip, where `batchguard still-held` costs the start of a program. The connection must
 * lead to the database of the lock, and its role be that of the run, or have pg_read_all_stats.
 */
public class MonthlyClose {
    /** The session of the run, and no later one with the same number, holds the pair. */
    private static final String STILL_HELD = """
            SELECT EXISTS (
                SELECT FROM pg_locks JOIN pg_stat_activity USING (pid)
                 WHERE locktype = 'advisory' AND granted AND objsubid = 2
                   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
                   AND classid = ?::bigint::oid AND objid = ?::bigint::oid
                   AND pid = ? AND backend_start = ?::timestamptz)
            """;

    public static void main(String[] args) throws SQLException, InterruptedException {
        int chunks = Integer.parseInt(args[0]);
        long milliseconds = Long.parseLong(System.getenv().getOrDefault("CHUNK_MILLISECONDS", "500"));
        try (Connection connection = DriverManager.getConnection(System.getenv("JDBC_URL"))) {
            connection.setAutoCommit(false);
            for (int chunk = 1; chunk <= chunks; chunk++) {
                Thread.sleep(milliseconds); // the statements of one chunk
                if (!isStillHeld(connection)) { // last of all, so that as little as possible comes after the answer
                    connection.rollback();
                    System.out.println("rolled back");
                    System.exit(76);
                }
                connection.commit();
                System.out.println("chunk " + chunk + " done");
            }
        }
        System.out.println("all done");
    }

    private static boolean isStillHeld(Connection connection) throws SQLException {
        String[] pair = System.getenv("BATCHGUARD_KEY").split(":");
        try (PreparedStatement question = connection.prepareStatement(STILL_HELD)) {
            // pg_locks shows the two int4 unsigned.
            question.setLong(1, Integer.toUnsignedLong(Integer.parseInt(pair[0])));
            question.setLong(2, Integer.toUnsignedLong(Integer.parseInt(pair[1])));
            question.setInt(3, Integer.parseInt(System.getenv("BATCHGUARD_LOCK_PID")));
            question.setString(4, System.getenv("BATCHGUARD_LOCK_SINCE"));
            try (ResultSet answer = question.executeQuery()) {
                return answer.next() && answer.getBoolean(1);
            }
        }
    }
}
